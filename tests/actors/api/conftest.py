"""Fixtures: HTTPS servers with certificates that only these tests trust, the service, and its page."""

import asyncio
import collections
import dataclasses
import ipaddress
import re
import shutil
import ssl

import httpx
import pytest
import trustme
from openai import OpenAI

from actors.api.outbound.client import FetchSettings
from actors.api.outbound.webhook import read_secret
from actors.api.settings import ServiceSettings
from actors.api.worker import maintenance
from actors.jobs.store import open_database
from actors.reliability import ReliabilitySettings
from tests.actors.api import serving
from tests.actors.api.serving import running
from tests.waiting import SECONDS, wait_for

NAME = "pictures.test"
# What Chromium complains of, and tests of the page bring about: the last one by a job that fails while it is watched.
EXPECTED = " 400 |ERR_INTERNET_DISCONNECTED|ERR_INCOMPLETE_CHUNKED_ENCODING"


@pytest.fixture(scope="session")
def authority():
    return trustme.CA()


@pytest.fixture(scope="session")
def trust(authority):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


class Server:
    """An HTTPS server with an answer for each path: bytes, a list of bytes, or a coroutine function."""

    def __init__(self, context):
        self._context = context
        self.port = None
        self.answers = {}
        self.requests = []
        self.connections = 0
        self.names = []

    async def start(self, address="127.0.0.1", port=0):
        self._context.sni_callback = lambda _socket, name, _context: self.names.append(name)
        server = await asyncio.start_server(self._serve_connection, address, port, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve_connection(self, reader, writer):
        self.connections += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"Content-Length: (\d+)", head)
            self.requests.append(head + (await reader.readexactly(int(length[1])) if length else b""))
            answer = self.answers[head.split()[1].decode()]
            if callable(answer):
                await answer(writer)
            else:
                writer.write(answer.pop(0) if isinstance(answer, list) else answer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # The client has hung up.
        finally:
            writer.close()


@pytest.fixture
def new_server(authority):
    """Return a function that returns a server, not started yet, with a certificate for a name."""

    def make_server(name=NAME):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(name).configure_cert(context)
        return Server(context)

    return make_server


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Shorten the intervals of workers' periodic tasks."""
    monkeypatch.setattr(maintenance, "_WEBHOOKS_S", 0.1)


def make_settings(folder):
    return ServiceSettings(
        database=str(folder / "jobs.sqlite"),
        storage=str(folder / "results"),
        model=serving.MODEL,
        chips={"denoise_high": 4, "denoise_low": 8},
        reliability=ReliabilitySettings(check_in_s=0.3),
    )


@pytest.fixture
def settings(tmp_path):
    return make_settings(tmp_path)


@pytest.fixture(scope="session")
def refusing(tmp_path_factory):
    """A client of a service that many tests share: it has no jobs, because they send what is refused."""
    with (
        serving.serve(make_settings(tmp_path_factory.mktemp("refusing"))) as address,
        serving.open_client(address) as client,
    ):
        yield client


@pytest.fixture
def database(settings):
    opened = open_database(settings.database)
    yield opened
    opened.close()


@pytest.fixture
def engine(tmp_path):
    (tmp_path / "frames").mkdir()
    return serving.Engine(tmp_path / "frames")


@pytest.fixture
def service(settings):
    """Return the address of a service without a worker."""
    with serving.serve(settings) as address:
        yield address


@pytest.fixture
def client(service):
    with OpenAI(base_url=f"{service}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def worker(settings, service, engine):
    """Run a worker of the service."""
    with serving.working(settings, engine) as tools:
        yield tools


@pytest.fixture
def http(service):
    with httpx.Client(base_url=service, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def browser():
    """Return a Chromium for a module's tests of the page."""
    playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no Chromium (Debian: apt-get install chromium)")
    with playwright_api.sync_playwright() as playwright:
        chromium_browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield chromium_browser
        chromium_browser.close()


@pytest.fixture
def page(browser, service):
    """Open the page of a service. Requests to other servers and errors on its console fail the test."""
    from tests.actors.api.browsing import save_screenshot  # It needs playwright, which other tests don't.

    tab = browser.new_page()
    tab.set_default_timeout(1000 * SECONDS)
    problems = []
    tab.on("request", lambda sent: sent.url.startswith((service, "data:", "blob:")) or problems.append(sent.url))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on(
        "console",
        lambda entry: entry.type == "error" and not re.search(EXPECTED, entry.text) and problems.append(entry.text),
    )
    tab.goto(service)
    yield tab
    save_screenshot(tab, "end")
    tab.close()
    assert problems == []


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


async def here(host, port):
    return ["127.0.0.1"]


@pytest.fixture
def hook(new_server):
    """Run a client's HTTPS server."""
    server = new_server()
    server.answers = collections.defaultdict(lambda: OK)

    async def serve():
        async with await server.start() as started:
            await started.serve_forever()

    with running(serve()):
        wait_for(lambda: server.port)
        yield server


@pytest.fixture
def hook_settings(settings, hook, trust, tmp_path):
    fetching = FetchSettings(
        allowed=(ipaddress.ip_network("127.0.0.1/32"),), ports=frozenset({443, hook.port}), resolver=here, trust=trust
    )
    secret = tmp_path / "secret"
    read_secret(secret, make=True)
    return dataclasses.replace(settings, fetch=fetching, webhook_secret_file=str(secret))
