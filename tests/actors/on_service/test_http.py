"""What is between clients and the ingress: HAProxy as Serve runs it, its limits, and what a death there costs."""

import contextlib
import os
import select
import signal
import socket
import time

import grpc
import httpx
import psutil
import pytest

from tests.actors.on_slices.running import title
from tests.conftest import PHOTO
from tests.waiting import SECONDS, wait_for

pytestmark = pytest.mark.long

JOB = {"num_frames": "9", "num_inference_steps": "2", "prompt": "a cat", "size": "64x64"}
LOOPBACK = ("127.0.0.1", "::ffff:127.0.0.1")
PARTS = ("haproxy", "HAProxyManager", "ProxyActor", "ServeController", "Ingress")


@pytest.fixture
def http(online):
    with httpx.Client(base_url=online.address, timeout=SECONDS) as client:
        yield client


@pytest.fixture
def connect(online):
    """Return a connection, to write requests by hand."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(("127.0.0.1", online.port), timeout=SECONDS))


def listening(process):
    """Return the addresses at which a process listens; none where it has ended meanwhile."""
    try:
        return [connection.laddr for connection in process.net_connections("inet") if connection.status == "LISTEN"]
    except psutil.NoSuchProcess:
        return []


def test_nothing_is_open_to_the_network_but_what_asks_for_the_token(online):
    """Serve's replicas listen everywhere for each other's calls."""
    open_to_all = [
        (process, address.port)
        for process in online.processes("")
        for address in listening(process)
        if address.ip not in LOOPBACK
    ]
    assert open_to_all
    for process, port in open_to_all:
        assert "ServeReplica" in title(process)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", timeout=20)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    ports = {address.port for process in online.processes("haproxy") for address in listening(process)}
    assert ports == {online.port}


def test_bodies_end_where_they_must(online, http):
    limit = online.settings.limits.body_bytes
    answer = http.post("/v1/videos", data=JOB, files={"input_reference": bytes(limit - 10_000_000)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")  # it arrived, and is no image
    for body in (bytes(limit + 1), iter([bytes(65536)] * (limit // 65536 + 2))):  # announced, and in chunks
        try:
            answer = http.post("/v1/videos", content=body, headers={"Content-Type": "application/json"})
        except httpx.WriteError:
            continue  # it was hung up on while it sent
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert http.get("/health").status_code == 200


@pytest.mark.thorough  # tests/cluster/test_haproxy.py times them out, too.
def test_slow_clients_hold_nobody_up(http, connect):
    slow = [connect() for _ in range(100)]
    for connection in slow:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
    start = time.monotonic()
    assert http.get("/health").status_code == 200
    assert not select.select(slow, [], [], 0)[0]  # it was answered before anyone was given up
    assert {connection.recv(30)[:12] for connection in slow} == {b"HTTP/1.1 408"}
    assert time.monotonic() - start > 8


def test_client_that_hangs_up_leaves_nothing_behind(online, http, connect):
    [ingress] = online.processes("Ingress")
    long = {"files": {"input_reference": PHOTO.read_bytes()}, "data": JOB | {"num_inference_steps": "1000"}}
    jobs = [http.post("/v1/videos", **long).json()["id"] for _ in range(5)]
    job = jobs[-1]  # which the others keep from ending
    before = len(ingress.net_connections("inet"))
    following = [connect() for _ in range(50)]
    for connection in following:
        connection.sendall(f"GET /v1/videos/{job}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert {connection.recv(15) for connection in following} == {b"HTTP/1.1 200 OK"}
    assert len(ingress.net_connections("inet")) > max(50, before + 20)  # some of those before had nothing to do
    for connection in following:
        connection.close()
    wait_for(lambda: len(ingress.net_connections("inet")) < before + 10, "the end of connections")
    for job in jobs:
        http.post(f"/v1/videos/{job}/cancel")


@pytest.mark.soak  # test_chaos.py kills each of them, too.
@pytest.mark.parametrize("part", PARTS)
def test_each_part_comes_again(online, http, part):
    wait_for(lambda: up(online, http), "the whole service")
    killed = online.processes(part)
    for process in killed:
        os.kill(process.pid, signal.SIGKILL)
    start, missed, gap, answers = time.monotonic(), 0, 0.0, []

    def again():
        return {process.pid for process in online.processes(part)} - {process.pid for process in killed}

    while not (again() and time.monotonic() - start > 7 and gap < time.monotonic() - start - 5):
        assert time.monotonic() - start < 2 * SECONDS, f"no {part} comes"
        try:
            answer = http.get("/v1/models")
            if answer.status_code == 200:
                time.sleep(0.05)
                continue
            answers.append((answer.status_code, answer.headers.get("retry-after"), answer.text[:100]))
        except httpx.TransportError:
            pass
        missed, gap = missed + 1, time.monotonic() - start
        time.sleep(0.05)
    print(f"{part}: {missed} requests had no answer, the last {gap:.1f} s after; {sorted(set(answers))}")
    for status, after, text in answers:  # a 404 would say that there are no such jobs
        assert (status, bool(after), text[:8]) == (503, True, '{"error"'), (status, after, text)
    assert part in ("haproxy", "HAProxyManager", "Ingress") or missed == 0


def up(online, http):
    with contextlib.suppress(httpx.TransportError):
        return all(online.processes(part) for part in PARTS) and http.get("/ready").status_code == 200
