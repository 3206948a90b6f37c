"""HTTPS requests to URLs that clients name, without letting them reach where only this machine can.

https only; every address that a name resolves to is checked, and the connection goes to a checked address itself, so
that a second look-up can't lead elsewhere.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import re
import ssl
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import IO, Any
from urllib.parse import urljoin, urlsplit

import httpcore

from actors.api.outbound.addresses import Network, is_address, refusal
from actors.api.outbound.resolver import process_resolver
from wan_tpu.errors import InvalidRequest

log = logging.getLogger(__name__)

_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 3
_MAX_URL = 8192  # Characters. Signed URLs of object stores have up to some 3,000.
_MAX_HOST = 253  # Characters of a DNS name in its text form (RFC 1035, section 2.3.4).
_ONE_AT_A_TIME = threading.Lock()  # Callers that come before the context is made wait for the same one.
_SIZE = re.compile(r"[0-9]{1,15}", re.ASCII)
_IMAGE = {"Accept": "image/*", "Accept-Encoding": "identity"}


class FetchError(InvalidRequest):
    """The server that a client named may not be asked, can't be reached, or doesn't answer as it should."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchSettings:
    """What may be fetched.

    what        is behind a URL, for messages
    max_bytes   of the content
    timeout_s   for all of it: names, connections, redirects, content
    ports       that a URL may name
    allowed     networks that may be reached although they aren't public: an operator's own image servers
    resolver    returns the addresses of a host's name; the system's, in turn by owner, when left out
    trust       certificates that servers are checked against; the system's when left out
    """

    what: str = "image"
    max_bytes: int = 20_000_000
    timeout_s: float = 20.0
    ports: frozenset[int] = frozenset({443})
    allowed: tuple[Network, ...] = ()
    resolver: Callable[[str, int], Awaitable[list[str]]] | None = None
    trust: ssl.SSLContext | None = None


def default_trust() -> ssl.SSLContext:
    """Return the context with the system's certificates, which the whole process shares.

    Reading the certificates takes 40 ms, so that the first call belongs in a thread.
    """
    with _ONE_AT_A_TIME:
        return _made_trust()


@functools.cache
def _made_trust() -> ssl.SSLContext:
    return ssl.create_default_context()


def check_url(url: str, settings: FetchSettings) -> httpcore.URL:
    """Return a URL that may be asked, its addresses not looked up yet; raises `FetchError`.

    Lengths are checked before anything else: encoding a host of 480 kB took five seconds.
    """
    what = settings.what
    if len(url) > _MAX_URL:
        raise FetchError(f"the {what}'s URL has {len(url)} characters; at most {_MAX_URL} are taken")
    try:
        parts = urlsplit(url)
        if len(parts.hostname or "") > _MAX_HOST:
            raise FetchError(f"the {what}'s URL has a host of more than {_MAX_HOST} characters; no name is that long")
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port or 443
    except ValueError as error:  # UnicodeError is one
        raise FetchError(f"the {what}'s URL can't be read ({error}); give one such as https://host/path") from None
    if parts.scheme != "https":
        raise FetchError(f"the {what}'s URL begins with {parts.scheme[:20]!r}; only https:// URLs are used")
    if not host:
        raise FetchError(f"the {what}'s URL names no host; give one such as https://host/path")
    if parts.username is not None or parts.password is not None:
        raise FetchError(f"the {what}'s URL has a user or password in it; give one without")
    if port not in settings.ports:
        raise FetchError(f"the {what}'s URL has port {port}; allowed: {', '.join(map(str, sorted(settings.ports)))}")
    if is_address(host) and (problem := refusal(host, settings.allowed)):
        raise FetchError(f"{host} {problem}; only the public internet is reached")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not (host + target).isascii() or not (host + target).isprintable():
        raise FetchError(f"the {what}'s URL has characters that must be percent-encoded; encode them")
    return httpcore.URL(scheme="https", host=host, port=port, target=target)


class Answer:
    """The answer of a server that a client named: its status and headers, and its content as it comes.

    The last value counts of a header that comes more than once.
    """

    def __init__(self, host: str, response: httpcore.Response) -> None:
        self._host, self._response = host, response
        self.status = response.status
        self.headers = {name.decode("latin-1").lower(): text.decode("latin-1") for name, text in response.headers}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the content in pieces; raises `FetchError`."""
        chunks = self._response.aiter_stream()
        while True:
            with _fetch_errors(self._host):
                chunk = await anext(chunks, None)
            if chunk is None:
                return
            yield chunk


@contextlib.asynccontextmanager
async def request(
    method: str,
    url: str,
    settings: FetchSettings,
    headers: Mapping[str, str],
    content: bytes | None = None,
    *,
    owner: str = "",
) -> AsyncIterator[Answer]:
    """Send a request and give the answer, its content not read yet.

    Args:
        method: such as "GET"
        url: an https URL
        settings: what may be asked; its time limit is the caller's to hold
        headers: of the request, beside those that every request has
        content: of the request
        owner: for whom it is sent; names are looked up in turn by owner

    Raises:
        FetchError: whatever goes wrong with the URL or the server behind it. What the caller raises while it uses the
            answer passes unchanged.
    """
    checked = check_url(url, settings)
    host, port = checked.host.decode(), checked.port
    named = f"[{host}]" if ":" in host else host
    common = {"Host": named if port == 443 else f"{named}:{port}", "User-Agent": "wan-tpu", "Connection": "close"}
    if content is not None:
        common["Content-Length"] = str(len(content))
    trust = settings.trust or await asyncio.to_thread(default_trust)
    network = CheckedNetwork(settings, owner)
    async with contextlib.AsyncExitStack() as stack:
        with _fetch_errors(host):
            pool = httpcore.AsyncConnectionPool(ssl_context=trust, network_backend=network)
            stack.push_async_callback(_close, pool.aclose)
            asked = httpcore.Request(method, checked, headers=[*common.items(), *headers.items()], content=content)
            response = await pool.handle_async_request(asked)
            stack.push_async_callback(_close, response.aclose)
            answer = Answer(host, response)
        yield answer


async def _close(close: Callable[[], Awaitable[None]]) -> None:
    """Close what was opened. The answer is known by then, and no server can change it by how it ends a connection."""
    try:
        await close()
    except Exception as error:
        log.debug("closing a connection failed", exc_info=error)


@contextlib.contextmanager
def _fetch_errors(host: str) -> Iterator[None]:
    """Raise whatever goes wrong while a server is asked as `FetchError`: nothing of it is this service's fault."""
    try:
        yield
    except FetchError:
        raise
    except httpcore.LocalProtocolError as error:
        raise FetchError(f"{host} can't be asked: the URL has characters that must be percent-encoded") from error
    except httpcore.ConnectError as error:
        cause = error.args[0] if error.args else error
        if isinstance(cause, ssl.SSLError):
            raise FetchError(f"{host} has no certificate that is trusted ({cause.reason or 'TLS failed'})") from error
        raise FetchError(f"{host} can't be reached ({error})") from error
    except httpcore.ConnectTimeout as error:
        raise FetchError(f"{host} can't be reached (no answer in time)") from error
    except ssl.SSLError as error:
        raise FetchError(f"{host} broke TLS ({error.reason or 'unknown reason'})") from error
    except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError) as error:
        raise FetchError(f"{host} did not answer as it should ({type(error).__name__}: {error})") from error
    except Exception as error:  # what a server can do isn't known in full: the libraries below raise more than they say
        log.warning("a server was asked in vain", exc_info=error, extra={"fields": {"host": host}})
        raise FetchError(f"{host} did not answer as it should ({type(error).__name__})") from error


async def fetch(url: str, settings: FetchSettings, into: IO[bytes], *, owner: str = "") -> None:
    """Write the image at an https URL into a file; each redirect is checked anew.

    Args:
        url: of the image
        settings: what may be fetched
        into: a file in memory, or of a fast disk: it is written to in the event loop
        owner: for whom it is fetched; names are looked up in turn by owner

    Raises:
        FetchError: saying why the image can't be had
    """
    try:
        async with asyncio.timeout(settings.timeout_s):
            for _ in range(_MOST_REDIRECTS + 1):
                async with request("GET", url, settings, _IMAGE, owner=owner) as answer:
                    location = answer.headers.get("location")
                    if answer.status not in _REDIRECTS or location is None:
                        return await _content(answer, settings, into)
                try:
                    url = urljoin(url, location)
                except ValueError:  # what is no URL is refused as what it is
                    url = location
    except TimeoutError:
        raise FetchError(
            f"the image did not come within {settings.timeout_s:g} s; send the file itself as input_reference"
        ) from None
    raise FetchError(f"the image's URL redirects more than {_MOST_REDIRECTS} times; give its last address")


async def _content(answer: Answer, settings: FetchSettings, into: IO[bytes]) -> None:
    if answer.status != 200:
        raise FetchError(f"the image's server answered with status {answer.status}; check the image's URL")
    encoding = answer.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise FetchError(f"the image came in encoding {encoding[:20]!r}, which wasn't asked for")
    announced, size = answer.headers.get("content-length", ""), 0
    if _SIZE.fullmatch(announced) and int(announced) > settings.max_bytes:
        raise _too_large(settings)
    async with contextlib.aclosing(answer.chunks()) as chunks:
        async for chunk in chunks:
            size += len(chunk)
            if size > settings.max_bytes:
                raise _too_large(settings)
            into.write(chunk)


def _too_large(settings: FetchSettings) -> FetchError:
    return FetchError(
        f"the image has more than {settings.max_bytes} bytes, which is all that is taken; shrink it first"
    )


class CheckedNetwork(httpcore.AnyIOBackend):
    """The network, of which only public addresses are reached: names are resolved and checked here, and only here."""

    def __init__(self, settings: FetchSettings, owner: str) -> None:
        self._settings, self._owner = settings, owner

    async def connect_tcp(self, host: str, port: int, *options: Any, **named: Any) -> httpcore.AsyncNetworkStream:
        """Connect to a checked address of a host; raises `FetchError` unless all of them may be connected to."""
        return await super().connect_tcp(await self._checked_address(host, port), port, *options, **named)

    async def _checked_address(self, host: str, port: int) -> str:
        resolver = self._settings.resolver
        try:
            if resolver is not None:
                found = await resolver(host, port)
            else:
                found = await process_resolver().resolve(host, port, self._owner)
        except (OSError, UnicodeError) as error:  # the latter for a name that can't be written in DNS
            reason = getattr(error, "strerror", None) or error
            raise FetchError(
                f"the name {host} has no address ({reason}); check the {self._settings.what}'s URL"
            ) from None
        for address in found:
            # Which one isn't said: it would reveal what this network's names resolve to.
            if problem := refusal(address, self._settings.allowed):
                raise FetchError(f"{host} {problem}; only the public internet is reached")
        if not found:
            raise FetchError(f"the name {host} has no address; check the {self._settings.what}'s URL")
        return next((address for address in found if ":" not in address), found[0])  # IPv4, if there is
