"""moto's S3 over real HTTP, able to fail as the service does."""

import re
import threading

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

ACCOUNT = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


class Emulator:
    """Starts in this process on a free port of the loopback interface.

    failures  (HTTP status, message, "before" | "after" the request is carried out), for the next requests
    refusal  (HTTP status, code) of whatever has a checksum, as from Cloudflare's R2 and older MinIO
    requester_pays  it refuses requests that don't say that the requester pays
    """

    def __init__(self):
        self.failures = []
        self.refusal = None
        self.requester_pays = False
        self.seen = []
        self._application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Silent)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = ACCOUNT | {"AWS_ENDPOINT_URL": self.address}

    def _answer(self, environ, start_response):
        self.seen.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}")
        if self.refusal is not None and any("CHECKSUM" in name or name == "HTTP_X_AMZ_TRAILER" for name in environ):
            failure = (*self.refusal, "before")
        elif self.requester_pays and not _says_who_pays(environ):
            failure = (403, "Access Denied", "before")
        elif self.failures:
            failure = self.failures.pop(0)
        else:
            return self._application(environ, start_response)
        status, message, when = failure
        if when == "after":  # the request is carried out, its answer is lost
            list(self._application(environ, lambda *args: None))
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        code = re.sub(r"\W", "", message if " " not in message else message.title())
        start_response(f"{status} {message}", [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()]

    def make_bucket(self, name):
        boto3.client(
            "s3",
            endpoint_url=self.address,
            region_name=ACCOUNT["AWS_DEFAULT_REGION"],
            aws_access_key_id=ACCOUNT["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=ACCOUNT["AWS_SECRET_ACCESS_KEY"],
        ).create_bucket(Bucket=name)

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def count_uploads(storage):
    """Return how many uploads in parts have begun below a storage's prefix, and not ended."""
    return len(storage.client.list_multipart_uploads(Bucket=storage.bucket, Prefix=storage.prefix).get("Uploads", ()))


def _says_who_pays(environ):
    """Return whether a header says so, or the parameter of a signed address."""
    return environ.get("HTTP_X_AMZ_REQUEST_PAYER") == "requester" or "x-amz-request-payer" in environ["QUERY_STRING"]


class _Silent(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *args):
        pass
