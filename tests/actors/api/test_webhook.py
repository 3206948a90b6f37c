"""Webhooks reach a real HTTPS server, which checks them with OpenAI's client, and no private addresses."""

import asyncio
import base64
import dataclasses
import http.server
import os
import socket
import threading

import openai
import pytest

from actors.api.outbound import webhook
from actors.api.outbound.client import FetchError, FetchSettings, check_url
from actors.api.outbound.webhook import read_secret
from actors.jobs import deliveries
from actors.jobs.keys import make_key
from tests.actors.api.conftest import NAME, OK
from tests.actors.api.serving import bearer, create, open_client, serve, wait_for_end, working
from tests.waiting import wait_for
from wan_tpu.errors import InvalidInput

NO = b"HTTP/1.1 503 Later\r\nContent-Length: 0\r\n\r\n"


def test_the_end_of_a_job_is_told_signed_and_again_when_it_has_to_be(
    hook_settings, hook, database, engine, tmp_path, monkeypatch
):
    monkeypatch.setattr(webhook, "_PAUSES_S", (0.2, 0.2, 0.2))
    hook.answers["/told?a=b"] = [NO, NO, OK]
    with serve(hook_settings) as address, open_client(address) as http, working(hook_settings, engine):
        job = create(http, webhook_url=f"https://{NAME}:{hook.port}/told?a=b").json()["id"]
        wait_for_end(http, job)
        wait_for(lambda: len(hook.requests) == 3)
        wait_for(lambda: deliveries.count_waiting(database) == 0)
        assert deliveries.claim(database) is None
    ids = set()
    for request in hook.requests:
        head, _, body = request.partition(b"\r\n\r\n")
        method, *lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        ids.add(headers["webhook-id"])
    assert method.startswith("POST /told?a=b") and len(ids) == 1
    secret, webhooks = (tmp_path / "secret").read_text().strip(), openai.OpenAI(api_key="none").webhooks
    event = webhooks.unwrap(body, headers, secret=secret)
    assert (event.type, event.data.id) == ("video.completed", job)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        webhooks.unwrap(body + b" ", headers, secret=secret)


def test_a_failed_job_and_one_cancelled_while_it_waits_are_told_too(hook_settings, hook, engine):
    with serve(hook_settings) as address, open_client(address) as http:
        job = create(http, webhook_url=f"https://{NAME}:{hook.port}/").json()["id"]
        http.post(f"/v1/videos/{job}/cancel")
        with working(hook_settings, engine):
            wait_for(lambda: hook.requests)
    assert b'"video.failed"' in hook.requests[0]


def test_a_server_that_never_answers_well_is_given_up(hook_settings, hook, engine, monkeypatch):
    monkeypatch.setattr(webhook, "_PAUSES_S", (0.1,))
    hook.answers["/"] = [NO] * 9
    with serve(hook_settings) as address, open_client(address) as http, working(hook_settings, engine) as tools:
        create(http, webhook_url=f"https://{NAME}:{hook.port}/")
        given_up = tools.meters.webhooks.labels("given_up")
        wait_for(lambda: given_up._value.get() == 1)
        assert len(hook.requests) == 2


def test_an_address_that_can_t_be_right_is_refused_at_once(hook_settings):
    """test_fetch.py has others; names are looked up when they are called."""
    with serve(hook_settings) as address, open_client(address) as http:
        for url in ("http://pictures.test/", "no", "https://127.0.0.2/", "https://[fe80::1]/"):
            answer = create(http, webhook_url=url)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "webhook_url")


@pytest.mark.parametrize("host", ["[::1]", "private.test"])
def test_webhook_on_this_machine_is_called_over_http_where_the_operator_permits_it(hook_settings, host):
    called, addresses = [], {"localhost": "127.0.0.1", "private.test": "127.0.0.1"}

    async def find(name, port):
        return [addresses.get(name, name)]

    class Client(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            called.append((self.path, self.headers["Host"]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    class Server(http.server.HTTPServer):
        address_family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET

    service = dataclasses.replace(hook_settings, fetch=FetchSettings(resolver=find))
    with Server((host.strip("[]") if host == "[::1]" else "127.0.0.1", 0), Client) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://{host}:{server.server_port}/told"
        with pytest.raises(FetchError):
            asyncio.run(webhook.post(url, (b"{}", {}), service.webhooks))
        local = dataclasses.replace(service, local_webhooks=True).webhooks
        assert asyncio.run(webhook.post(url, (b"{}", {}), local)) == 204
        server.shutdown()
    assert called == [("/told", f"{host}:{server.server_port}")]


@pytest.mark.parametrize(
    ("address", "ports"),
    [("93.184.216.34", {443}), ("2606:4700::1111", {443}), ("169.254.169.254", set()), ("fe80::1", set())]
    + [(address, set()) for address in ("fd00:ec2::254", "fd20:ce::254", "fd00:c1::a9fe:a9fe")],
)
def test_local_webhooks_open_no_other_port_of_the_internet(settings, address, ports):
    local = dataclasses.replace(settings, local_webhooks=True).webhooks
    assert {port for port in (80, 443, 8443) if local.explain_refusal("https", address, port) is None} == ports
    assert all(local.explain_refusal("http", address, port) for port in (80, 443, 8443))
    with pytest.raises(FetchError):
        check_url("ftp://127.0.0.1/", local)


def test_the_secret_is_made_once_and_for_its_owner_only(tmp_path):
    file = tmp_path / "new" / "secret"
    with pytest.raises(InvalidInput):
        read_secret(file)
    secret = read_secret(file, make=True)
    assert len(secret) == 32 and read_secret(file, make=True) == read_secret(file) == secret
    assert file.stat().st_mode & 0o077 == 0
    assert base64.b64decode(file.read_text().strip().removeprefix("whsec_")) == secret
    for text, problem in {"nonsense!": "whsec_", "": r"\b0\b"}.items():
        file.write_text(text)
        with pytest.raises(InvalidInput, match=problem):
            read_secret(file)


def test_receivers_that_never_answer_hold_up_those_of_their_key_alone(hook_settings, hook, database, engine):

    async def silent(writer):
        await asyncio.sleep(60)

    hook.answers["/never"] = silent
    mallory, ann = (bearer(make_key(database, name)) for name in ("mallory", "ann"))
    few = dataclasses.replace(
        hook_settings, limits=dataclasses.replace(hook_settings.limits, webhooks=6, webhooks_of_a_key=4)
    )
    with serve(few) as address, open_client(address) as http, working(few, engine):
        for _ in range(8):
            create(http, mallory, webhook_url=f"https://{NAME}:{hook.port}/never")
        wait_for(lambda: len(hook.requests) == 4)
        create(http, ann, webhook_url=f"https://{NAME}:{hook.port}/ann")
        wait_for(lambda: any(request.startswith(b"POST /ann") for request in hook.requests))
        assert len(hook.requests) == 5


async def break_tls(writer):
    """Send bytes that aren't TLS after the handshake."""
    os.write(writer.get_extra_info("socket").fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))
    await asyncio.sleep(1)


def test_webhook_of_a_broken_server_cuts_off_no_other_and_is_counted(hook_settings, hook, engine, monkeypatch):
    monkeypatch.setattr(webhook, "_LOOK_S", 0.1)
    answered = threading.Event()

    async def slow(writer):
        while not answered.is_set():
            await asyncio.sleep(0.02)
        writer.write(OK)

    hook.answers["/slow"], hook.answers["/broken"] = slow, break_tls
    with serve(hook_settings) as address, open_client(address) as http, working(hook_settings, engine) as tools:
        outcomes = {name: tools.meters.webhooks.labels(name)._value for name in ("failed", "delivered")}
        create(http, webhook_url=f"https://{NAME}:{hook.port}/slow")
        wait_for(lambda: hook.requests)
        create(http, webhook_url=f"https://{NAME}:{hook.port}/broken")
        wait_for(lambda: outcomes["failed"].get() == 1)
        create(http, webhook_url=f"https://{NAME}:{hook.port}/third")
        wait_for(lambda: outcomes["delivered"].get() == 1)
        answered.set()
        wait_for(lambda: outcomes["delivered"].get() == 2)
        paths = [request.split()[1] for request in hook.requests]
        assert sorted(path for path in paths if path != b"/broken") == [b"/slow", b"/third"]
        assert b"/broken" in paths  # On a busy machine it is called again meanwhile.
