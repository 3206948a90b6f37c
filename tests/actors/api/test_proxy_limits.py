"""The middleware in Serve's own proxy limits bodies and rates, in front of code that reads everything."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys

import httpx
import psutil
import pytest
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse

from actors.api.http.proxy_limits import ProxyLimits, middlewares
from actors.api.limits import ServiceLimits
from cluster.provision import haproxy
from tests.actors.api.serving import listening, open_client
from tests.actors.api.test_hostile import Sent
from tests.actors.on_service.conftest import free_port
from tests.actors.on_slices.running import title
from tests.conftest import ROOT
from tests.waiting import wait_for

# A body: 2 MB.
LIMITS = ServiceLimits(
    image_bytes=750_000, video_bytes=750_000, bodies_bytes=4_000_000, bodies=3, body_s=2.0, body_rate=1e6
)


async def serve_like(scope, receive, send):
    """Read everything as fast as it arrives, and answer meanwhile, as Serve's proxy and its replicas do."""
    if scope["type"] != "http":
        return
    sizes, whole = [], asyncio.Event()

    async def read():
        while (message := await receive())["type"] == "http.request":
            sizes.append(len(message["body"]))
            if not message.get("more_body"):
                whole.set()
        whole.set()

    reading = asyncio.create_task(read())
    try:
        match scope["path"]:
            case "/unknown":
                answer = PlainTextResponse("Path '/unknown' not found.", 404)
            case "/missing":
                answer = JSONResponse({"error": {"code": "video_not_found"}}, 404)
            case "/refused":  # The answer comes from code that hasn't read the body.
                answer = JSONResponse({"error": {"code": "invalid_api_key"}}, 401)
            case "/stream":

                async def parts():
                    while not reading.done():
                        yield b"."
                        await asyncio.sleep(0.05)

                answer = StreamingResponse(parts())
            case _:
                await whole.wait()
                answer = JSONResponse({"size": sum(sizes)})
        await answer(scope, receive, send)
    finally:
        reading.cancel()


@contextlib.contextmanager
def serve_limited(**bounds):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in bounds.items():
            patch.setenv(name, str(value))
        app = ProxyLimits(serve_like, LIMITS)
    with listening(app) as address, open_client(address) as http:
        yield http


@pytest.fixture(scope="module")
def http():
    with serve_limited() as http:
        yield http


def code(answer):
    return answer.status_code, answer.json()["error"]["code"]


def test_a_body_passes_whole_and_a_long_one_not(http):
    assert http.post("/", content=bytes(1_900_000)).json() == {"size": 1_900_000}
    refused = http.post("/", content=bytes(2_100_000))
    assert code(refused) == (413, "too_large") and refused.headers["connection"] == "close"

    def without_a_length():
        for _ in range(30):
            yield bytes(100_000)

    with contextlib.suppress(httpx.WriteError):  # The server disconnects while this is still sending.
        assert code(http.post("/", content=without_a_length())) == (413, "too_large")
    assert http.post("/", content=b"x").json() == {"size": 1}


def test_refusal_of_the_application_is_answered_before_the_body_is_there(http):
    sent = Sent(http, ["POST /refused HTTP/1.1", "Content-Length: 1900000"], bytes(1000))
    wait_for(lambda: sent.status == 401)


def test_bodies_that_never_end_are_given_up_and_the_most_greedy_first(http):
    lines = ["POST / HTTP/1.1", "Content-Length: 1990000"]
    connections = [Sent(http, [*lines, "Authorization: Bearer mallory"], bytes(1_500_000)) for _ in range(2)]
    joe = Sent(http, [*lines, "Authorization: Bearer joe"], bytes(1_500_000))  # Then there is no room for all three.
    wait_for(lambda: any(b"was dropped" in sent.answered for sent in connections))
    wait_for(lambda: [sent.status for sent in (*connections, joe)] == [408] * 3)
    assert b"did not arrive" in joe.answered
    slow = [Sent(http, [*lines, "Authorization: Bearer mallory"], b"x") for _ in range(4)]
    wait_for(lambda: sorted(str(sent.status) for sent in slow) == ["408", "408", "408", "429"])


def test_many_that_are_small_or_only_ask_are_no_bodies(http):
    """One address may have more streams and slow answers than bodies under way."""
    with contextlib.ExitStack() as stack:
        for method in ("GET", "POST") * 3:
            content = b"{}" if method == "POST" else None
            stream = stack.enter_context(http.stream(method, "/stream", content=content))
            assert stream.status_code == 200
        assert http.post("/", content=bytes(100_000)).status_code == 200


def test_serve_s_own_refusal_is_a_json_503_with_retry_after(http):
    answer = http.get("/unknown")
    assert code(answer) == (503, "unavailable") and answer.headers["retry-after"]
    assert code(http.get("/missing")) == (404, "video_not_found")


@pytest.mark.parametrize(
    ("bounds", "headers"),
    [
        ({"WAN_TPU_REQUESTS_OF_AN_ADDRESS": 20}, {}),
        ({"WAN_TPU_REQUESTS_OF_A_KEY": 20}, {"Authorization": "Bearer ann"}),
    ],
)
def test_client_above_its_rate_is_answered_with_429(bounds, headers):
    with serve_limited(**bounds) as http:
        answers = [http.get("/missing", headers=headers) for _ in range(40)]
        passed = sum(answer.status_code == 404 for answer in answers)
        assert 20 <= passed < 40 and code(answers[-1]) == (429, "rate_limit_exceeded")
        assert answers[-1].headers["retry-after"]
        others = http.get("/missing", headers={"Authorization": "Bearer joe"})
        assert others.status_code == (404 if headers else 429)


def test_key_has_no_more_than_its_requests_at_once():
    with serve_limited(WAN_TPU_CONCURRENT_OF_A_KEY=2) as http, contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(http.stream("GET", "/stream", headers={"Authorization": "Bearer ann"}))
        assert http.get("/missing", headers={"Authorization": "Bearer ann"}).status_code == 429
        assert http.get("/missing", headers={"Authorization": "Bearer joe"}).status_code == 404


def test_a_key_is_one_key_however_it_is_written():
    ann = f"wan_{'a' * 16}_{'a' * 64}"
    with serve_limited(WAN_TPU_REQUESTS_OF_A_KEY=3) as http:
        spellings = (f"Bearer {ann}", f"Bearer   {ann}", f"bearer \t{ann}", f"Bearer {ann}")
        statuses = [http.get("/missing", headers={"Authorization": spelling}).status_code for spelling in spellings]
        assert statuses == [404, 404, 404, 429]


def test_addresses_of_an_ipv6_network_are_one():
    async def statuses(*addresses):
        app = ProxyLimits(serve_like, LIMITS)
        codes = []
        for address in addresses:
            transport = httpx.ASGITransport(app, client=(address, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                codes.append((await http.get("/missing")).status_code)
        return codes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAN_TPU_REQUESTS_OF_AN_ADDRESS", "2")
        of_a_network = [f"2001:db8:0:1::{i}" for i in range(1, 4)]
        assert asyncio.run(statuses(*of_a_network, "2001:db8:0:2::1")) == [404, 404, 429, 404]
        assert asyncio.run(statuses("10.0.0.1", "::ffff:10.0.0.1", "10.0.0.1", "10.0.0.2")) == [404, 404, 429, 404]


def test_retry_after_is_as_long_as_that_takes():
    with serve_limited(WAN_TPU_REQUESTS_OF_AN_ADDRESS=2) as http:
        refused = [http.get("/missing") for _ in range(3)][-1]
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")  # Two in ten seconds.


def test_headers_that_are_for_serve_come_from_no_client():
    seen = {}

    async def app(scope, receive, send):
        seen.update({name.decode(): value for name, value in scope["headers"]})
        await JSONResponse({})(scope, receive, send)

    sent = {
        "X-Request-Timeout-Seconds": "0.01",
        "serve-multiplexed-model-id": "x",
        "x-session-id": "x",
        "x-mine": "kept",
    }
    with listening(ProxyLimits(app, LIMITS)) as address:
        assert httpx.get(address, headers=sent, timeout=60).status_code == 200
    assert seen["x-mine"] == b"kept" and not {name.lower() for name in sent} & seen.keys() - {"x-mine"}


def test_behind_haproxy_it_does_nothing(monkeypatch):
    monkeypatch.setenv("WAN_TPU_LIMITS", "bodies=5 image_bytes=300")
    [middleware] = middlewares()
    assert middleware.kwargs["limits"] == ServiceLimits(bodies=5, image_bytes=300)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert middlewares() == []


@pytest.mark.soak
def test_serves_own_proxy_holds_no_more_of_bodies_than_its_limits():
    """Measure the memory of the proxy and a replica while attackers send ten times as much."""
    environment = os.environ | {
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": haproxy.INSTEAD,
        "WAN_TPU_LIMITS": "bodies_bytes=60000000",
    }
    command = [sys.executable, "-m", "tests.actors.api.own_proxy", str(port := free_port())]
    serving = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            assert serving.stdout.readline() == b"listens\n"
            wait_for(lambda: code(http.get("/")) == (503, "unavailable"))
            serving.stdin.write(b"go on\n")
            serving.stdin.flush()
            assert serving.stdout.readline() == b"serves\n"
            image = bytes(20_000_000)
            wait_for(lambda: http.post("/", content=image).text == "20000000")
            assert code(http.post("/", content=bytes(28_000_000))) == (413, "too_large")
            children = psutil.Process(serving.pid).children(recursive=True)
            processes = [child for child in children if re.match("ray::(ProxyActor|ServeReplica:sizes)", title(child))]
            assert len(processes) == 2
            before, most = sum(process.memory_info().rss for process in processes), 0
            lines = ["POST / HTTP/1.1", "Content-Length: 27000000"]
            connections = [Sent(http, [*lines, f"Authorization: Bearer {i % 4}"], image) for i in range(30)]
            for _ in range(20):
                assert http.post("/", content=b"small").text == "5"
                most = max(most, sum(process.memory_info().rss for process in processes) - before)
            assert most < 400e6  # 250 were seen; 600 MB were sent, which both would hold
            assert {sent.status for sent in connections} <= {None, 408, 429, 503}
            for sent in connections:
                sent.close()
    finally:
        serving.stdin.close()
        serving.wait(60)
