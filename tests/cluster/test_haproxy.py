"""HAProxy as Ray Serve configures it and we start it: what it listens on, and that it ends with who has started it."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest
from ray.serve._private.haproxy import HAProxyApi, HAProxyConfig
from ray.serve.config import HTTPOptions

from cluster.emulation import haproxy
from tests.waiting import wait_for

STARTER = "import subprocess, sys; subprocess.run(sys.argv[1:])"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Ray has HAProxy for Linux only")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def written(tmp_path):
    """The port and the file of a configuration that Serve has written."""

    async def write():
        config = HAProxyConfig(
            http_options=HTTPOptions(host="127.0.0.1", port=free_port()),
            socket_path=str(tmp_path / "admin"),
            server_state_base=str(tmp_path),
            server_state_file=str(tmp_path / "state"),
            metrics_enabled=False,
        )
        HAProxyApi(config, config_file_path=str(tmp_path / "config"))._generate_config_file_internal()
        return config.frontend_port, tmp_path / "config"

    return asyncio.run(write())


def test_it_listens_where_it_was_told_to_and_nowhere_else(written, tmp_path):
    port, file = written
    before = file.read_text()
    assert "frontend prometheus" in before and "listen stats" in before and "    log 127.0.0.1:514" in before
    given = haproxy.environment(tmp_path)
    start = [given["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(file), "-dR"]
    starter = subprocess.Popen([sys.executable, "-c", STARTER, *start], stderr=subprocess.DEVNULL)
    found = []

    def started():
        found[:] = [child for child in psutil.Process(starter.pid).children() if child.name() == "haproxy"]
        return bool(found and found[0].net_connections("inet"))

    try:
        wait_for(started, "its port")
        assert {(c.laddr.ip, c.laddr.port) for c in found[0].net_connections("inet")} == {("127.0.0.1", port)}
        with pytest.raises(urllib.error.HTTPError, match="503") as away:  # there is no application yet
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/videos/one", timeout=5)
        assert json.load(away.value)["error"]["code"] == "unavailable" and away.value.headers["Retry-After"] == "2"
    finally:
        os.kill(starter.pid, signal.SIGKILL)
        starter.wait()
    wait_for(lambda: not found[0].is_running() or found[0].status() == psutil.STATUS_ZOMBIE, "its end")


def test_an_address_has_so_many_connections_and_headers_so_much_time(written, tmp_path, monkeypatch):
    port, file = written
    monkeypatch.setenv("WAN_TPU_CONNECTIONS_OF_AN_ADDRESS", "20")
    start = haproxy.environment(tmp_path)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    started = subprocess.Popen([start, "-db", "-f", str(file), "-dR"], stderr=subprocess.DEVNULL)
    open_ = []
    try:
        wait_for(lambda: started.poll() is None and answers(port), "its port")
        for _ in range(30):
            open_.append(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(ConnectionError):
                open_[-1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX")  # half a header
        time.sleep(0.5)
        assert sum(is_open(one) for one in open_) == 20
        assert not answers(port)
        wait_for(lambda: not any(is_open(one) for one in open_), "the end of those whose headers never came")
        assert answers(port)
    finally:
        started.kill()
        started.wait()
        for one in open_:
            one.close()


def answers(port):
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def is_open(connection):
    """Whether nothing was answered, and nothing closed."""
    connection.setblocking(False)
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


def test_clusters_don_t_meet(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    one, other = haproxy.environment(tmp_path / "one"), haproxy.environment(tmp_path / "other")
    same = {name for name in one if one[name] == other[name]}
    assert not {name for name in same if name.endswith(("PATH", "LOC", "BASE", "FILE"))}
    assert (tmp_path / "one" / "haproxy").stat().st_mode & 0o077 == 0
