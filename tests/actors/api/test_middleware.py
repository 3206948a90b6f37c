"""What all routes have in common: counting, protection, and rejection before a route is called."""

import asyncio
import socket

import httpx
import pytest
from ray.serve._private.http_util import _apply_middlewares

from actors.api.core.access import Access
from actors.api.core.errors import HttpError
from actors.api.core.service import Service
from actors.api.http.app import make_app
from actors.api.limits import ServiceLimits
from actors.api.processes import make_served_app
from actors.jobs.keys import KeyLimits, list_keys, make_key
from actors.jobs.store import JobStore
from actors.jobs.work import WorkQueue
from tests.actors.api.serving import bearer, listening, open_client, serve
from tests.actors.jobs.test_store import ask
from tests.actors.small_spec import SPEC
from tests.waiting import SECONDS


def test_odd_methods_and_paths_make_no_series_of_metrics(settings):
    """Each had a series of its own, until the process ended: 1 MB of them in /metrics and in its heartbeat's row.

    Which methods arrive is the server's choice (h11 passes all of them), so that the application is asked without one.
    """

    async def ask_all():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(make_app(service)), base_url="http://localhost"
        ) as http:
            for path in ("/v1/videos", "/v1/videos/x", "/v1/models/x", "/health", "/metrics", "/nowhere"):
                for method in methods:
                    assert (await http.request(method, path)).status_code in (404, 405)

    service, methods = Service(settings, SPEC), ["FIRST"]
    try:
        asyncio.run(ask_all())
        meters = service.presence.meters
        before = meters.format_text().count("\n")
        methods = [f"ODD{i}" for i in range(40)]
        asyncio.run(ask_all())
        assert meters.format_text().count("\n") == before
        assert "ODD" not in meters.format_text() and "FIRST" not in meters.format_text()
    finally:
        service.database.close()


def test_answers_under_serve_have_one_id_which_is_the_client_s_if_it_sent_one(settings):
    app = _apply_middlewares(make_served_app(Service(settings, SPEC)), [])  # Serve's own.
    with listening(app) as address, open_client(address) as http:
        for path in ("/health", "/v1/videos/none", "/nowhere"):
            [made] = http.get(path).headers.get_list("x-request-id")
            assert made
            assert http.get(path, headers={"x-request-id": "mine-1"}).headers.get_list("x-request-id") == ["mine-1"]


def test_id_that_a_client_may_not_choose_is_replaced(http):
    for sent, answered in (("mine-1", "mine-1"), ("no\tid", "req_")):
        headers = http.get("/v1/videos/none", headers={"x-request-id": sent}).headers
        assert headers["x-request-id"].startswith(answered)


def test_metrics_name_keys_only_to_who_shows_one(settings, database):
    ann, bob, boss = (
        make_key(database, name, KeyLimits(scopes=scopes))
        for name, scopes in {"ann": ("make", "read"), "bob": ("make", "read"), "boss": ("operate",)}.items()
    )
    ids = {key.name: key.id for key in list_keys(database)}
    store, queue = JobStore(database), WorkQueue(database)
    for name in ("ann", "bob"):
        store.submit(ask(owner=ids[name]))
        claimed = queue.claim("w")
        queue.announce(claimed, {f"{name}.mp4": 1})
        queue.complete(claimed, {"video": f"{name}.mp4"})
    with serve(settings) as address, open_client(address) as http:
        strangers = http.get("/metrics")
        assert strangers.status_code == 200 and "wan_http_seconds" in strangers.text
        assert not any(word in strangers.text for word in ("wan_key", *ids.values()))
        for key, seen in {ann: {"ann"}, bob: {"bob"}, boss: {"ann", "bob"}}.items():
            text = http.get("/metrics", headers=bearer(key)).text
            assert {name for name in ids if f'wan_key_dollars_total{{key="{ids[name]}"}}' in text} == seen
        assert http.get("/metrics", headers=bearer("wan_none")).status_code == 401


def test_second_authorization_header_is_refused(settings, database):
    """A proxy could count the requests for one of the keys, while this service used the other."""
    ann, bob = make_key(database, "ann"), make_key(database, "bob")
    with serve(settings) as address, open_client(address) as http:
        both = [("Authorization", f"Bearer {ann}"), ("authorization", f"Bearer {bob}")]
        for headers in (both, both[::-1], [both[0], both[0]]):
            assert http.get("/v1/videos", headers=headers).status_code == 400
        for value in (f"Bearer {ann}", f"bearer   {ann}"):
            assert http.get("/v1/videos", headers={"Authorization": value}).status_code == 200
        for value in (f"Bearer {ann} {bob}", f"Bearer {ann}, Bearer {bob}", ann, f"Bearer x {ann}"):
            assert http.get("/v1/videos", headers={"Authorization": value}).status_code == 401


def test_retry_after_is_never_too_early(database):
    rate = 23.5
    make_key(database, "ann", KeyLimits(requests_per_minute=rate))
    access = Access(database, 10, ServiceLimits())
    owner = list_keys(database)[0]
    with pytest.raises(HttpError) as refused:
        for _ in range(100):
            access._count_request(owner)
    after_s, exact_s = int(refused.value.headers["Retry-After"]), access._rates.take(owner.id, 60 / rate)[0]
    assert exact_s <= after_s < exact_s + 1.1
    assert float(refused.value.headers["x-ratelimit-reset-requests"].rstrip("s")) >= exact_s


def test_no_answer_can_be_framed(http):
    for path in ("/", "/docs", "/health", "/v1/videos", "/v1/videos/none", "/openapi.json"):
        assert http.get(path).headers["x-frame-options"] == "DENY"


def test_page_of_another_site_may_link_here_and_not_frame(http):
    site = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    for dest, status in {"document": 200, "iframe": 403, "frame": 403, "embed": 403, "object": 403}.items():
        assert http.get("/v1/videos", headers=site | {"sec-fetch-dest": dest}).status_code == status
    assert http.get("/v1/videos", headers=site).status_code == 200  # An old browser, which sends no destination.


@pytest.mark.parametrize("length", ["Content-Length", "Transfer-Encoding"])
def test_client_that_sends_all_of_its_body_before_it_reads_gets_the_answer(http, length):
    """A connection that is closed with unread bytes is reset, and its client loses the answer."""
    parts = [bytes(1_000_000)] * 30
    if length == "Transfer-Encoding":
        value, parts = "chunked", [*(b"f4240\r\n" + part + b"\r\n" for part in parts), b"0\r\n\r\n"]
    else:
        value = f"{sum(map(len, parts))}"
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=SECONDS) as connection:
        connection.sendall(f"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\n{length}: {value}\r\n".encode())
        connection.sendall(b"Content-Type: application/json\r\n\r\n")
        for part in parts:
            connection.sendall(part)
        answered = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answered.startswith(b"HTTP/1.1 413 ") and b'"code":"too_large"' in answered.replace(b" ", b"")
