"""HAProxy as Ray Serve starts it through our program: what it listens on, its limits, and that it ends with Serve."""

import asyncio
import contextlib
import http.server
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

import cluster.provision.haproxy
from cluster.emulation import haproxy
from tests.waiting import wait_for

STARTER = "import subprocess, sys; subprocess.run(sys.argv[1:])"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Ray has HAProxy for Linux only")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def write_config(folder, *servers):
    """Have Serve write a configuration for servers, and return its port and its file."""

    async def write():
        config = HAProxyConfig(
            http_options=HTTPOptions(host="127.0.0.1", port=free_port()),
            socket_path=str(folder / "admin"),
            server_state_base=str(folder),
            server_state_file=str(folder / "state"),
            log_target=cluster.provision.haproxy.ENVIRONMENT["RAY_SERVE_HAPROXY_LOG_TARGET"],
            metrics_enabled=False,
        )
        api = HAProxyApi(config, config_file_path=str(folder / "config"))
        if servers:
            configs = [ServerConfig(name=f"s{port}", host="127.0.0.1", port=port) for port in servers]
            api.backend_configs = {"app": BackendConfig(name="app", path_prefix="/", app_name="app", servers=configs)}
        api._generate_config_file_internal()
        return config.frontend_port, folder / "config"

    return asyncio.run(write())


@contextlib.contextmanager
def run_haproxy(folder, *servers, starter=(), **variables):
    """Run HAProxy as Serve does on an emulated cluster, and yield its port and the process that started it."""
    port, file = write_config(folder, *servers)
    variables = os.environ | haproxy.environment(folder) | variables
    command = [*starter, variables["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(file), "-dR"]
    started = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=variables)
    try:
        wait_for(lambda: started.poll() is None and exchange(port), "its port")
        yield port, started
    finally:
        started.kill()
        started.wait()


class Echo(http.server.BaseHTTPRequestHandler):
    """Answers with the headers that reached it, as an ingress would see them; to /stream, only after a while."""

    def do_GET(self):
        body = json.dumps([[name.lower(), value] for name, value in self.headers.items()]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.path == "/stream":
            time.sleep(2.5)
        with contextlib.suppress(ConnectionError):  # A health check may close before it has read the body.
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def in_front_of_echo(folder, **variables):
    """Run HAProxy in front of a server, and yield its port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with run_haproxy(folder, server.server_port, **variables) as (port, _):
                wait_for(lambda: b" 200 " in exchange(port, b"Authorization: nobody"), "its server")
                yield port
        finally:
            server.shutdown()


def exchange(port, *lines):
    """Send a request with additional lines of bytes, and return the whole answer."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as opened:
            head = [b"GET /v1/videos/one HTTP/1.1", b"Host: localhost", b"Connection: close", *lines, b"", b""]
            opened.sendall(b"\r\n".join(head))
            return b"".join(iter(lambda: opened.recv(65536), b""))
    except ConnectionError:
        return b""


def parse_answer(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.lower(), json.loads(body)


def find_haproxy(process):
    return [p for p in [process, *process.children()] if p.name() == "haproxy"]


def test_it_listens_where_it_was_told_to_and_ends_with_its_starter(tmp_path):
    with run_haproxy(tmp_path, starter=(sys.executable, "-c", STARTER)) as (port, started):
        [running] = find_haproxy(psutil.Process(started.pid))
        assert {(c.laddr.ip, c.laddr.port) for c in running.net_connections("inet")} == {("127.0.0.1", port)}
        sockets = {Path(c.laddr).parent for c in running.net_connections("unix") if c.laddr}
        assert sockets == {tmp_path} and stat.S_IMODE(tmp_path.stat().st_mode) == 0o700  # Nobody else controls it.
        # There is no application yet.
        status, head, body = parse_answer(exchange(port))
        assert (status, body["error"]["code"]) == (503, "unavailable") and b"retry-after: 2" in head
        os.kill(started.pid, signal.SIGKILL)
        wait_for(lambda: not running.is_running() or running.status() == psutil.STATUS_ZOMBIE, "its end")


def test_address_has_so_many_connections_and_headers_so_much_time(tmp_path):
    connections = []
    with run_haproxy(tmp_path, WAN_TPU_CONNECTIONS_OF_AN_ADDRESS="20") as (port, _), contextlib.ExitStack() as stack:
        for _ in range(30):
            connections.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
            with contextlib.suppress(ConnectionError):
                connections[-1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX")  # Half of a header.
        time.sleep(0.5)
        assert sum(is_open(connection) for connection in connections) == 20
        assert not exchange(port)
        wait_for(lambda: not any(is_open(connection) for connection in connections), "the end of the slow")
        assert exchange(port)


def is_open(connection):
    """Return whether nothing was answered and nothing closed."""
    connection.setblocking(False)
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


def test_headers_that_are_for_serve_come_from_no_client(tmp_path):
    """With a client's time-out, Serve would answer 408 although the job was accepted."""
    with in_front_of_echo(tmp_path) as port:
        sent = (
            b"X-Request-Timeout-Seconds: 0.01",
            b"Serve-Multiplexed-Model-Id: \xff",
            b"serve_multiplexed_model_id: x",
            b"X-Session-Id: \xff",
            b"X-Request-Id: \xff",
            b"X-Request-Disconnect-Disabled: ?0",
            b"Idempotency-Key: kept",
        )
        reached = dict(parse_answer(exchange(port, *sent))[2])
        assert reached["idempotency-key"] == "kept" and reached["x-request-disconnect-disabled"] == "?1"
        assert not {name for name in reached if name.startswith(("x-request-t", "serve", "x-session", "x-request-i"))}
        assert dict(parse_answer(exchange(port, b"X-Request-Id: mine-1"))[2])["x-request-id"] == "mine-1"
        for other in (b"no id", b"a" * 65, b"<b>"):
            assert "x-request-id" not in dict(parse_answer(exchange(port, b"X-Request-Id: " + other))[2])


def test_key_is_one_key_however_it_is_written(tmp_path):
    ann, bob = (f"wan_{letter * 16}_{letter * 64}".encode() for letter in "ab")
    with in_front_of_echo(tmp_path, WAN_TPU_REQUESTS_OF_A_KEY="6") as port:
        spellings = (
            b"Bearer %s",
            b"Bearer  %s",
            b"bearer    %s",
            b"BEARER \t %s",
            b"Bearer %s   ",
            b"Bearer \xa0%s\xa0",
        )
        for spelling in spellings:
            assert parse_answer(exchange(port, b"Authorization: " + spelling % ann))[0] == 200
        for spelling in spellings:
            status, head, body = parse_answer(exchange(port, b"Authorization: " + spelling % ann))
            assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded") and b"retry-after: 10" in head
        assert parse_answer(exchange(port, b"Authorization: Bearer " + bob))[0] == 200
        for first, second in ((ann, bob), (bob, ann)):
            status, _, body = parse_answer(
                exchange(port, b"Authorization: Bearer " + first, b"authorization: Bearer " + second)
            )
            assert (status, body["error"]["code"]) == (400, "invalid_value")


def test_key_has_no_more_than_its_requests_at_once_and_answers_may_be_silent(tmp_path):
    """A client that watches a video hears nothing before the first frames are decoded."""
    variables = {"WAN_TPU_CONCURRENT_OF_A_KEY": "2", "WAN_TPU_REQUESTS_OF_A_KEY": "0"}
    with in_front_of_echo(tmp_path, **variables) as port, contextlib.ExitStack() as stack:
        ann = {"Authorization": "Bearer ann"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/stream", headers=ann)
        streams = [stack.enter_context(urllib.request.urlopen(request, timeout=10)) for _ in range(2)]
        assert parse_answer(exchange(port, b"Authorization: Bearer ann"))[0] == 429
        assert parse_answer(exchange(port, b"Authorization: Bearer bob"))[0] == 200
        assert all(["authorization", "Bearer ann"] in json.load(stream) for stream in streams)


def test_trusted_proxys_clients_are_limited_each_by_itself(tmp_path):
    """Google's load balancers append the client's address and then their own to what the client sent."""
    variables = {
        "WAN_TPU_REQUESTS_OF_AN_ADDRESS": "5",
        "WAN_TPU_TRUSTED_PROXIES": "127.0.0.0/8 35.191.0.0/16",
        "WAN_TPU_FORWARDED_HOPS": "2",
    }
    with in_front_of_echo(tmp_path, **variables) as port:

        def ask(client, before=b""):
            return parse_answer(exchange(port, b"X-Forwarded-For: " + before + client + b", 34.117.0.9"))[0]

        assert [ask(b"198.51.100.1") for _ in range(7)] == [200] * 5 + [429] * 2
        assert ask(b"198.51.100.2") == 200
        # A client that writes the header itself comes before what the load balancer adds.
        assert ask(b"198.51.100.1", before=b"203.0.113.9, ") == 429
        assert ask(b"198.51.100.3", before=b"198.51.100.1, ") == 200
        # All addresses of an IPv6 /64 network count as one client.
        assert [ask(b"2001:db8:0:1::%d" % i) for i in range(7)] == [200] * 5 + [429] * 2
        assert ask(b"2001:db8:0:2::1") == 200


def test_header_of_a_proxy_that_is_not_trusted_says_nothing(tmp_path):
    variables = {"WAN_TPU_REQUESTS_OF_AN_ADDRESS": "9", "WAN_TPU_TRUSTED_PROXIES": "35.191.0.0/16"}
    with in_front_of_echo(tmp_path, **variables) as port:
        answers = [parse_answer(exchange(port, b"X-Forwarded-For: 198.51.100.%d" % i))[0] for i in range(12)]
        assert answers.count(429) >= 3


def test_sections_that_listen_are_left_out_unless_they_are_extended():
    """A Serve that opens other ports must not open them to the network."""
    serves = "global\n  a\ndefaults\n  b\nfrontend web\n  bind :1\nbackend app\n  c\nlisten new\n  bind :2"
    ours = "# a comment\ndefaults\n  later\n\nfrontend web\n  first\nbackend keys\n  d\n"
    lines = [line.strip() for line in cluster.provision.haproxy.extend(serves, ours).splitlines() if line]
    assert lines == [
        *("global", "a"),
        *("defaults", "b", "later"),
        *("frontend web", "first", "bind :1"),
        *("backend app", "c"),
        *("backend keys", "d"),
    ]


def test_clusters_do_not_meet(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    first, second = haproxy.environment(tmp_path / "one"), haproxy.environment(tmp_path / "other")
    same = {name for name in first if first[name] == second[name]}
    assert not {name for name in same if name.endswith(("PATH", "LOC", "BASE", "FILE"))}
    assert (tmp_path / "one" / "haproxy").stat().st_mode & 0o077 == 0
