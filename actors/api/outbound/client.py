"""Requests to URLs that clients name. They can't reach hosts that are accessible only from this machine.

Only https is used, unless an operator permits more for development. Every address that a name resolves to is checked,
and the connection goes to a checked address itself, so that a second look-up can't lead elsewhere.
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

from actors.api.outbound.addresses import Network, explain_refusal, is_address
from actors.api.outbound.resolver import get_resolver
from actors.reliability import ReliabilitySettings
from wan_tpu.errors import InvalidRequest

log = logging.getLogger(__name__)

_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 3
_MAX_URL = 8192  # Characters. Signed URLs of object stores have up to some 3,000.
_MAX_HOST = 253  # Characters of a DNS name in its text form (RFC 1035, section 2.3.4).
_TRUST_LOCK = threading.Lock()  # Lets callers wait for the one context while it is being created.
_PORTS = {"https": 443, "http": 80}  # The port of a URL that names none.
_SIZE = re.compile(r"[0-9]{1,15}", re.ASCII)


class FetchError(InvalidRequest):
    """A server that a client named may not be contacted, can't be reached, or doesn't answer properly."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchSettings:
    """What may be fetched."""

    subject: str = "image"  # What a URL refers to, for messages, and the type that is asked for: image, video or audio.
    max_bytes: int = 20_000_000
    # Limit on the whole request: names, connections, redirects and content.
    timeout_s: float = ReliabilitySettings.fetch_s
    ports: frozenset[int] = frozenset({443})
    # Networks that may be reached although they aren't public, such as an operator's own image servers.
    allowed: tuple[Network, ...] = ()
    local: tuple[Network, ...] = ()  # Networks that may be reached over http and on any port, too.
    # Returns the addresses of a host's name. By default the system's resolver is used, which owners of requests get in
    # turn.
    resolver: Callable[[str, int], Awaitable[list[str]]] | None = None
    trust: ssl.SSLContext | None = None  # Certificates that servers are checked against; by default the system's.

    def explain_refusal(self, scheme: str, address: str, port: int) -> str | None:
        """Return why a port of an address may not be connected to, or None if it may."""
        is_usual = scheme == "https" and port in self.ports
        return explain_refusal(address, (*self.allowed, *self.local), only_allowed=not is_usual)


def load_default_trust() -> ssl.SSLContext:
    """Return the context with the system's certificates, which the whole process shares.

    Reading the certificates takes 40 ms, so the first call belongs in a thread.
    """
    with _TRUST_LOCK:
        return _load_trust()


@functools.cache
def _load_trust() -> ssl.SSLContext:
    return ssl.create_default_context()


def check_url(url: str, settings: FetchSettings) -> httpcore.URL:
    """Parse and check a URL, without looking up its host yet; raises `FetchError`.

    Lengths are checked first, since encoding a host of 480 kB took five seconds.
    """
    subject = settings.subject
    if len(url) > _MAX_URL:
        raise FetchError(f"the {subject}'s URL has {len(url)} characters; at most {_MAX_URL} are accepted")
    try:
        parts = urlsplit(url)
        if len(parts.hostname or "") > _MAX_HOST:
            raise FetchError(
                f"the {subject}'s URL has a host name of more than {_MAX_HOST} characters, which can't exist; check "
                "the URL"
            )
        host = (parts.hostname or "").encode("idna").decode()
        port = parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError as error:  # UnicodeError is a subclass.
        raise FetchError(f"the {subject}'s URL can't be read ({error}); give one such as https://host/path") from None
    schemes = ("https", "http") if settings.local else ("https",)
    if parts.scheme not in schemes:
        used = " and ".join(f"{scheme}://" for scheme in schemes)
        raise FetchError(f"the {subject}'s URL begins with {parts.scheme[:20]!r}; only {used} URLs are used")
    if not host:
        raise FetchError(f"the {subject}'s URL names no host; give one such as https://host/path")
    if parts.username is not None or parts.password is not None:
        raise FetchError(f"the {subject}'s URL has a user or password in it; give one without")
    if port not in settings.ports and not settings.local:
        raise FetchError(f"the {subject}'s URL has port {port}; allowed: {', '.join(map(str, sorted(settings.ports)))}")
    if is_address(host) and (problem := settings.explain_refusal(parts.scheme, host, port)):
        raise FetchError(f"{host} {problem}")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not (host + target).isascii() or not (host + target).isprintable():
        raise FetchError(f"the {subject}'s URL has characters that must be percent-encoded; encode them")
    return httpcore.URL(scheme=parts.scheme, host=host, port=port, target=target)


class Answer:
    """A server's answer: its status and headers, and its content as it arrives.

    If a header is repeated, its last value counts.
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
    """Send a request and yield the answer, before its content is read.

    Args:
        url: An https URL.
        settings: What may be fetched. The caller applies its time limit.
        headers: Headers in addition to those that every request has.
        owner: Who the request is for. Owners get the resolver in turn.

    Yields:
        The answer.

    Raises:
        FetchError: Anything went wrong with the URL or the server behind it. Exceptions that the caller raises while
            using the answer pass through unchanged.
    """
    target = check_url(url, settings)
    host, port = target.host.decode(), target.port
    authority = f"[{host}]" if ":" in host else host
    common = {
        "Host": authority if port == _PORTS[target.scheme.decode()] else f"{authority}:{port}",
        "User-Agent": "wan-tpu",
        "Connection": "close",
    }
    if content is not None:
        common["Content-Length"] = str(len(content))
    trust = settings.trust or await asyncio.to_thread(load_default_trust)
    network = CheckedNetwork(settings, target.scheme.decode(), owner)
    async with contextlib.AsyncExitStack() as stack:
        with _fetch_errors(host):
            pool = httpcore.AsyncConnectionPool(ssl_context=trust, network_backend=network)
            stack.push_async_callback(_close, pool.aclose)
            outgoing = httpcore.Request(method, target, headers=[*common.items(), *headers.items()], content=content)
            response = await pool.handle_async_request(outgoing)
            stack.push_async_callback(_close, response.aclose)
            answer = Answer(host, response)
        yield answer


async def _close(close: Callable[[], Awaitable[None]]) -> None:
    """Close a connection. Errors are only logged: the answer is known, however the server ends the connection."""
    try:
        await close()
    except Exception as error:
        log.debug("closing a connection failed", exc_info=error)


@contextlib.contextmanager
def _fetch_errors(host: str) -> Iterator[None]:
    """Turn anything that goes wrong with a server into `FetchError`, since none of it is this service's fault."""
    try:
        yield
    except FetchError:
        raise
    except httpcore.LocalProtocolError as error:
        raise FetchError(f"{host} can't be asked: the URL has characters that must be percent-encoded") from error
    except httpcore.ConnectError as error:
        cause = error.args[0] if error.args else error
        if isinstance(cause, ssl.SSLError):
            raise FetchError(f"{host} has no trusted certificate ({cause.reason or 'TLS failed'})") from error
        raise FetchError(f"{host} can't be reached ({error})") from error
    except httpcore.ConnectTimeout as error:
        raise FetchError(f"{host} can't be reached (no answer in time)") from error
    except ssl.SSLError as error:
        raise FetchError(f"{host} broke TLS ({error.reason or 'unknown reason'})") from error
    except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError) as error:
        raise FetchError(f"{host} did not answer as it should ({type(error).__name__}: {error})") from error
    except Exception as error:  # The libraries below raise more than they document, depending on what a server does.
        log.warning("a request to a server failed", exc_info=error, extra={"fields": {"host": host}})
        raise FetchError(f"{host} did not answer as it should ({type(error).__name__})") from error


async def fetch(url: str, settings: FetchSettings, output: IO[bytes], *, owner: str = "") -> None:
    """Fetch the file at an https URL into another one. Each redirect is checked anew.

    Args:
        output: A file in memory or on a fast disk, since it is written to in the event loop.
        owner: Who it is for. Owners get the resolver in turn.

    Raises:
        FetchError: It can't be fetched, for the reason in the message.
    """
    headers = {"Accept": f"{settings.subject}/*", "Accept-Encoding": "identity"}
    try:
        async with asyncio.timeout(settings.timeout_s):
            for _ in range(_MOST_REDIRECTS + 1):
                async with request("GET", url, settings, headers, owner=owner) as answer:
                    location = answer.headers.get("location")
                    if answer.status not in _REDIRECTS or location is None:
                        return await _copy_content(answer, settings, output)
                try:
                    url = urljoin(url, location)
                except ValueError:  # The next request rejects it with the proper message.
                    url = location
    except TimeoutError:
        raise FetchError(
            f"the {settings.subject} did not come within {settings.timeout_s:g} s; send the file itself"
        ) from None
    raise FetchError(f"the {settings.subject}'s URL redirects more than {_MOST_REDIRECTS} times; give its last address")


async def _copy_content(answer: Answer, settings: FetchSettings, output: IO[bytes]) -> None:
    if answer.status != 200:
        raise FetchError(f"the {settings.subject}'s server answered with status {answer.status}; check the URL")
    encoding = answer.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise FetchError(f"the {settings.subject} came in encoding {encoding[:20]!r}, which wasn't requested")
    content_length, size = answer.headers.get("content-length", ""), 0
    if _SIZE.fullmatch(content_length) and int(content_length) > settings.max_bytes:
        raise _build_too_large_error(settings)
    async with contextlib.aclosing(answer.chunks()) as chunks:
        async for chunk in chunks:
            size += len(chunk)
            if size > settings.max_bytes:
                raise _build_too_large_error(settings)
            output.write(chunk)


def _build_too_large_error(settings: FetchSettings) -> FetchError:
    return FetchError(
        f"the {settings.subject} has more than {settings.max_bytes} bytes, the most that is accepted; shrink it first"
    )


class CheckedNetwork(httpcore.AnyIOBackend):
    """A network backend that reaches only public addresses. Names are resolved and checked here, and nowhere else."""

    def __init__(self, settings: FetchSettings, scheme: str, owner: str) -> None:
        self._settings, self._scheme, self._owner = settings, scheme, owner

    async def connect_tcp(self, host: str, port: int, *options: Any, **keywords: Any) -> httpcore.AsyncNetworkStream:
        """Connect to a checked address of a host; raises `FetchError` unless all its addresses are permitted."""
        return await super().connect_tcp(await self._resolve_checked(host, port), port, *options, **keywords)

    async def _resolve_checked(self, host: str, port: int) -> str:
        resolver = self._settings.resolver
        try:
            if resolver is not None:
                addresses = await resolver(host, port)
            else:
                addresses = await get_resolver().resolve(host, port, self._owner)
        except (OSError, UnicodeError) as error:  # UnicodeError: the name can't be written in DNS.
            reason = getattr(error, "strerror", None) or error
            raise FetchError(
                f"the name {host} has no address ({reason}); check the {self._settings.subject}'s URL"
            ) from None
        for address in addresses:
            # The address isn't quoted, since it would reveal what names of this network resolve to.
            if problem := self._settings.explain_refusal(self._scheme, address, port):
                raise FetchError(f"{host} {problem}")
        if not addresses:
            raise FetchError(f"the name {host} has no address; check the {self._settings.subject}'s URL")
        return next((address for address in addresses if ":" not in address), addresses[0])  # IPv4, if there is
