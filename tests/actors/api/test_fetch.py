"""Fetching by URL from real HTTPS servers: permitted content arrives, and nothing else is even connected to."""

import asyncio
import dataclasses
import errno
import ipaddress
import os
import re
import ssl
import threading
import time

import pytest

from actors.api.outbound import client
from actors.api.outbound.client import FetchError, FetchSettings, check_url, fetch
from tests.actors.api.conftest import NAME
from tests.actors.api.fetching import ELSEWHERE, HERE, answer, fetch_bytes, resolver, run_and_fetch, running


@pytest.fixture
def settings(trust):
    find, _ = resolver(pictures_test=[HERE])
    network = (ipaddress.ip_network(f"{HERE}/32"),)
    return FetchSettings(max_bytes=1000, timeout_s=20, allowed=network, resolver=find, trust=trust)


def test_an_image_arrives(new_server, settings):
    server = new_server()
    server.answers = {"/cat.png?size=2": answer(b"image")}
    assert run_and_fetch(server, settings, "/cat.png?size=2#top") == b"image"
    (request,) = server.requests
    assert f"host: {NAME}:{server.port}".encode() in request.lower()
    assert server.names == [NAME]  # The certificate is requested by name, though the connection goes to an address.


def test_chunks_arrive(new_server, settings):
    server = new_server()
    server.answers = {
        "/cat.png": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nima\r\n2\r\nge\r\n0\r\n\r\n",
        "/old.png": b"HTTP/1.0 200 OK\r\n\r\nimage",  # The content ends with the connection.
    }
    assert run_and_fetch(server, settings) == b"image"
    assert run_and_fetch(server, settings, "/old.png") == b"image"


@pytest.mark.parametrize(
    "url",
    [
        "http://pictures.test/cat.png",
        "file:///etc/passwd",
        "",
        "data:image/png;base64,AAAA",
        "https:///cat.png",
        "https://ann:secret@pictures.test/cat.png",
        "https://pictures.test:22/cat.png",
        "https://[::1/cat.png",
        "https://pictures.test/a b\r\nHost: evil",
        "https://pictures.test/a\0b",
        "https://" + "é." * 150 + "test/",
        "https://pictures.test/" + "a" * 8200,
    ],
)
def test_other_urls_are_refused(settings, url):
    find, _ = resolver(pictures_test=[HERE])
    closed = dataclasses.replace(settings, resolver=find, allowed=(ipaddress.ip_network("127.0.0.0/8"),))
    with pytest.raises(FetchError):
        asyncio.run(fetch_bytes(url, closed))


@pytest.mark.parametrize("addresses", [[ELSEWHERE], [HERE, ELSEWHERE], ["::ffff:127.0.0.1"], ["169.254.169.254"], []])
def test_a_name_that_leads_inside_is_not_connected_to(new_server, settings, addresses):
    server = new_server()
    server.answers = {"/cat.png": answer(b"secret")}

    async def do():
        async with running(server, settings, address=ELSEWHERE) as (ready, base):
            find, _ = resolver(pictures_test=addresses)
            await fetch_bytes(base + "/cat.png", dataclasses.replace(ready, resolver=find))

    with pytest.raises(FetchError, match=NAME):
        asyncio.run(do())
    assert server.connections == 0


@pytest.mark.parametrize(
    "host", [ELSEWHERE, "0x7f.2", "2130706434", "[::1]", "localhost", "[::ffff:127.0.0.2]", "[::ffff:0:127.0.0.1]"]
)
def test_spellings_of_an_address_lead_no_further(settings, host):
    real = dataclasses.replace(settings, resolver=FetchSettings().resolver, allowed=())
    with pytest.raises(FetchError, match=re.escape(host.strip("[]"))):
        asyncio.run(fetch_bytes(f"https://{host}/", real))


def test_the_address_that_was_checked_is_the_one_connected_to(new_server, settings):
    """A name that resolves to something else a moment later (DNS rebinding) gains nothing."""
    good, evil = new_server(), new_server()
    good.answers, evil.answers = {"/cat.png": answer(b"image")}, {"/cat.png": answer(b"secret")}
    find, lookups = resolver(pictures_test=[[HERE], [ELSEWHERE]])

    async def do():
        async with running(good, settings) as (ready, base), running(evil, settings, address=ELSEWHERE, port=good.port):
            ready = dataclasses.replace(ready, resolver=find)
            first = await fetch_bytes(base + "/cat.png", ready)
            with pytest.raises(FetchError, match=NAME):
                await fetch_bytes(base + "/cat.png", ready)
            return first

    assert asyncio.run(do()) == b"image"
    assert lookups == [NAME, NAME]
    assert evil.connections == 0


def test_redirects_are_followed_and_checked_again(new_server, settings):
    server, inside = new_server(), new_server("inside.test")
    inside.answers = {"/": answer(b"secret")}
    find, _ = resolver(pictures_test=[HERE], inside_test=[ELSEWHERE])

    async def do():
        async with (
            running(server, dataclasses.replace(settings, resolver=find)) as (ready, base),
            running(inside, settings, address=ELSEWHERE, port=server.port),
        ):
            server.answers = {
                "/moved": answer(status="302 Found", Location="/cat.png"),
                "/cat.png": answer(b"image"),
                "/inside": answer(status="307 Temporary Redirect", Location=f"https://inside.test:{server.port}/"),
                "/plain": answer(status="301 Moved", Location="http://pictures.test/cat.png"),
                "/file": answer(status="301 Moved", Location="file:///etc/passwd"),
                "/round": answer(status="302 Found", Location="/round"),
                "/none": answer(status="302 Found", Location="https://[x"),
            }
            assert await fetch_bytes(base + "/moved", ready) == b"image"
            for path, reason in {
                "/inside": "inside.test",
                "/plain": "'http'",
                "/file": "'file'",
                "/round": r"\b3\b",
                "/none": "https://",
            }.items():
                with pytest.raises(FetchError, match=reason):
                    await fetch_bytes(base + path, ready)

    asyncio.run(do())
    assert inside.connections == 0


async def endless(writer):
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x" * 100)
        await writer.drain()


async def endless_header(writer):
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: " + b"x" * 1000 + b"\r\n")
        await writer.drain()


async def dripping(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (answer(b"x" * 1001), r"\b1000\b"),
        (endless, r"\b1000\b"),
        (endless_header, NAME),
        (answer(b"x", "404 Not Found"), r"\b404\b"),
        (answer(b"x", Content_Encoding="gzip"), "gzip"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhalf", NAME),
    ],
)
def test_answer_that_is_no_image_of_an_allowed_size_is_refused(new_server, settings, response, reason):
    server = new_server()
    server.answers = {"/cat.png": response}
    with pytest.raises(FetchError, match=reason):
        run_and_fetch(server, settings)


async def broken_record(writer):
    """Send half an answer, then bytes that aren't TLS, which no client library expects."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\nhalf")
    await writer.drain()
    await asyncio.sleep(0.05)
    connection = writer.get_extra_info("socket")
    os.write(connection.fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))


async def reset(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\nhalf")
    await writer.drain()
    writer.transport.abort()


HOSTILE = {
    "a broken TLS record": broken_record,
    "a reset": reset,
    "no status": b"HTTP/1.1\r\n\r\n",
    "status 999": b"HTTP/1.1 999 OK\r\n\r\n",
    "an unasked switch": b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
    "a header without a name": b"HTTP/1.1 200 OK\r\n: x\r\n\r\n",
    "a header of NUL": b"HTTP/1.1 200 OK\r\nX: \0\r\n\r\n",
    "a length of 5000 digits": b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
    "chunks of any size": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 5000 + b"\r\n",
    "an unknown transfer": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nx",
    "a redirect to nowhere": b"HTTP/1.1 302 Found\r\nLocation: \xff\xfe://[\r\nContent-Length: 0\r\n\r\n",
    "a redirect to a long name": b"HTTP/1.1 302 F\r\nLocation: https://"
    + b"\xe9." * 9000
    + b"x/\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_whatever_a_server_does_is_a_fetch_error(new_server, settings, case):
    server = new_server()
    server.answers = {"/cat.png": HOSTILE[case]}
    with pytest.raises(FetchError):
        run_and_fetch(server, settings)
    assert server.connections == 1


def test_a_full_disk_here_is_not_blamed_on_the_server(new_server, settings):
    server = new_server()
    server.answers = {"/cat.png": answer(b"x" * 900)}

    async def do():
        async with running(server, settings) as (ready, base):
            with open("/dev/full", "wb", buffering=0) as full:
                await fetch(base + "/cat.png", ready, full)

    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as raised:
        asyncio.run(do())
    assert not isinstance(raised.value, FetchError)


def test_a_long_host_costs_no_time(settings):
    start = time.process_time()
    for host in ("é." * 240_000, "é" * 8000, "." * 8000):
        with pytest.raises(FetchError):
            check_url(f"https://{host}/", settings)
    assert time.process_time() - start < 0.1


def test_the_tls_context_is_not_made_in_the_event_loop(settings, monkeypatch):
    threads = []
    make = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda: threads.append(threading.current_thread()) or make())
    client._load_trust.cache_clear()

    async def do():
        closed = dataclasses.replace(settings, trust=None, ports=frozenset({1}))
        for _ in range(3):
            with pytest.raises(FetchError):
                await fetch_bytes(f"https://{NAME}:1/", closed)

    asyncio.run(do())
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


def test_slow_servers_are_given_up_in_time(new_server, settings):
    server = new_server()
    server.answers = {"/cat.png": dripping}
    began = time.monotonic()
    with pytest.raises(FetchError, match=r"\b1 s\b"):
        run_and_fetch(server, settings, timeout_s=1.0)
    assert time.monotonic() - began < 15


def test_certificates_are_checked(new_server, settings):
    wrong = new_server("other.test")
    wrong.answers = {"/cat.png": answer(b"image")}
    with pytest.raises(FetchError, match="certificate"):
        run_and_fetch(wrong, settings)
    server = new_server()
    server.answers = {"/cat.png": answer(b"image")}
    with pytest.raises(FetchError, match="certificate"):
        run_and_fetch(server, settings, trust=ssl.create_default_context())
    assert server.requests == []
