"""An emulated cluster as users have it: commands in processes of their own, also through a forwarded port."""

import contextlib
import io
import json
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time

import pytest

from actors.cli import main
from cluster.connect import leave
from tests.children import run_command
from tests.conftest import PHOTO, ROOT
from tests.waiting import SECONDS

REQUEST = {"prompt": "A cat looks.", "image": str(PHOTO), "height": 64, "width": 96, "frames": 5, "fps": 8}


class Forwarding(socketserver.ThreadingTCPServer):
    """A port of this machine behind which another address lies, as `kubectl port-forward` makes one."""

    daemon_threads = True

    def __init__(self, to):
        super().__init__(("127.0.0.1", 0), Forward)
        self.to = to.rsplit(":", 1)


class Forward(socketserver.BaseRequestHandler):
    def handle(self):
        with socket.create_connection((self.server.to[0], int(self.server.to[1]))) as there:
            back = threading.Thread(target=self.pass_on, args=(there, self.request), daemon=True)
            back.start()
            self.pass_on(self.request, there)
            back.join()

    @staticmethod
    def pass_on(source, target):
        with contextlib.suppress(OSError):
            while piece := source.recv(65_536):
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)


def reasons(err):
    """The lines that aren't progress."""
    return [line for line in err.splitlines() if not re.match(r" *\d+ s |connecting to the cluster$", line)]


class Cluster:
    """The cluster and the commands on it."""

    def __init__(self, running, layout, checkpoint):
        self.running, self.layout = running, layout
        self.pipeline = ["--layout", str(layout), "--model_id", str(checkpoint), "--dtype", "float32"]

    def start(self, *argv):
        command = [sys.executable, "-m", "actors.cli", argv[0], *argv[1:], "--folder", str(self.running.folder)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)

    def run(self, *argv):
        done = run_command(*argv, "--folder", self.running.folder)
        return done.returncode, done.stdout, done.stderr

    def status(self):
        """What `wan-tpu status --json` says; asked in this process, since it is asked often."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = main(["status", "--json", "--folder", str(self.running.folder)])
        leave()  # or this process would end with the cluster
        assert code == 0
        return json.loads(out.getvalue())

    def stepping(self, process=None):
        """Wait until a request that is being computed has done a step; return the status then."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            assert process is None or process.poll() is None, process.communicate()
            time.sleep(1)  # or the commands that ask take what they ask for
            status = self.status()
            if not (pipeline := status["pipeline"]):
                continue
            replicas = [replica for pool in pipeline["pools"] for replica in pool["replicas"].values()]
            computed = {request for replica in replicas for _, request in replica["work"]}
            if any(request["step"] for key, request in pipeline["requests"].items() if key in computed):
                return status
        pytest.fail(f"no request comes to its first step; the last status was {status}")

    def check_nothing_is_held(self):
        status = self.status()
        assert status["pipeline"] is None
        assert [slice_["holder"] for slice_ in status["slices"]] == [None]


def manifest(path, **requests):
    path.write_text("".join(json.dumps(REQUEST | {"id": id_} | options) + "\n" for id_, options in requests.items()))
    return str(path)
