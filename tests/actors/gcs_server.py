"""The gcp-storage-emulator over real HTTP, able to fail as the service does."""

import json
import re
import threading
from functools import partial
from http import server

from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage


class _Handler(RequestHandler):
    def __init__(self, emulator, *args, **kwargs):
        self.emulator = emulator
        super().__init__(emulator.storage, *args, **kwargs)

    def parse_request(self):
        """Before the emulator sees a request: answer with the failures that a test asked for."""
        if not super().parse_request():
            return False
        self.emulator.seen.append(f"{self.command} {self.path}")
        if self.emulator.requester_pays and "userProject=" not in self.path:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._refuse(400, "Bucket is a requester pays bucket but no user project provided.")
            return False
        # Not the bucket's own: the client asks for its place in the background, once, whenever it likes.
        if self.emulator.failures and re.search(r"/b/[^/]+/o\b", self.path):
            status, message, when = self.emulator.failures.pop(0)
            if when == "after":  # the request is carried out, its answer is lost
                self.emulator.lose_answer = True
                return True
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_error(status, message)
            return False
        return True

    def _refuse(self, status, message):
        """Answer as the service's JSON API does."""
        body = json.dumps({"error": {"code": status, "message": message, "errors": [{"reason": "required"}]}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):  # noqa: N802 (http.server's name)
        answer = self.wfile
        if self.emulator.lose_answer:
            self.emulator.lose_answer = False
            self.wfile = _Nowhere()
        super().do_POST()
        if self.wfile is not answer:
            self.wfile = answer
            self._headers_buffer = []
            self.send_error(503, "Service Unavailable")

    def log_message(self, *args):
        pass


class _Nowhere:
    closed = False

    def write(self, content):
        return len(content)

    def flush(self):
        pass

    def close(self):
        pass


class Emulator:
    """Starts in this process on a free port of the loopback interface.

    failures  (HTTP status, message, "before" | "after" the request is carried out), for the next requests
    requester_pays  it refuses requests that name no project
    """

    def __init__(self):
        self.requester_pays = False
        self.storage = Storage(use_memory_fs=True)
        self.failures = []
        self.seen = []
        self.lose_answer = False
        self._server = server.HTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {"STORAGE_EMULATOR_HOST": self.address}

    def make_bucket(self, name):
        create_bucket(name, self.storage)

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
