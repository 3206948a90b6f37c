"""Fetch an image that a client names by URL, without letting it reach where only this machine can.

https only; every address that a name resolves to is checked, and the connection goes to the checked address itself, so
that a second look-up can't lead elsewhere; each redirect begins again; size and time are limited over the whole way.
"""

import asyncio
import contextlib
import dataclasses
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import SplitResult, urljoin, urlsplit

import h11

from actors.api.addresses import Network, is_address, refusal
from wan_tpu.errors import InvalidRequest

# Returns the addresses of a host's name.
Resolver = Callable[[str, int], Awaitable[list[str]]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK = 65536
_HEADER_BYTES = 32768


class FetchError(InvalidRequest):
    """The image can't be fetched from where the client said."""


async def resolve(host: str, port: int) -> list[str]:
    """Return all addresses of a name, by the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchSettings:
    """What may be fetched.

    what        is behind a URL, for messages
    max_bytes   of the content
    timeout_s   for all of it: names, connections, redirects, content
    redirects   how many are followed
    ports       that a URL may name
    allowed     networks that may be reached although they aren't public: an operator's own image servers
    resolver    finds the addresses of a name
    trust       certificates that servers are checked against; the system's when left out
    """

    what: str = "image"
    max_bytes: int = 20_000_000
    timeout_s: float = 20.0
    redirects: int = 3
    ports: frozenset[int] = frozenset({443})
    allowed: tuple[Network, ...] = ()
    resolver: Resolver = resolve
    trust: ssl.SSLContext | None = None


async def fetch(url: str, settings: FetchSettings = FetchSettings()) -> bytes:
    """Return the content at an https URL; raises `FetchError` saying what isn't allowed, or what went wrong."""
    try:
        async with asyncio.timeout(settings.timeout_s):
            for _ in range(settings.redirects + 1):
                content, location = await _get(check_url(url, settings), settings)
                if location is None:
                    return content
                url = urljoin(url, location)
    except TimeoutError:
        raise FetchError(
            f"the image did not come within {settings.timeout_s:g} s; send the file itself as input_reference"
        ) from None
    raise FetchError(f"the image's URL redirects more than {settings.redirects} times; give its last address")


def check_url(url: str, settings: FetchSettings) -> SplitResult:
    """Return the parts of a URL that may be asked, its addresses not looked up yet; raises `FetchError`."""
    what = settings.what
    try:
        parts = urlsplit(url)
        port = parts.port or 443
        host = parts.hostname
        if host is not None:
            host.encode("idna" if not host.isascii() else "ascii")
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
    return parts


@contextlib.asynccontextmanager
async def dial(url: SplitResult, settings: FetchSettings) -> AsyncIterator[tuple[Streams, str]]:
    """Give a connection to a URL's host, at an address that was checked, and the host's name; raises `FetchError`."""
    host, port = url.hostname or "", url.port or 443
    if not host.isascii():
        host = host.encode("idna").decode()
    address = await _checked_address(host, port, settings)
    context = settings.trust or ssl.create_default_context()
    try:
        reader, writer = await asyncio.open_connection(address, port, ssl=context, server_hostname=host)
    except ssl.SSLError as error:  # an OSError too
        raise FetchError(f"{host} has no certificate that is trusted ({error.reason or 'TLS failed'})") from None
    except OSError as error:
        raise FetchError(f"{host} can't be reached ({error.strerror or type(error).__name__})") from None
    try:
        yield (reader, writer), host
    except (h11.RemoteProtocolError, ssl.SSLError, OSError) as error:
        raise FetchError(f"{host} did not answer as it should ({type(error).__name__}: {error})") from None
    finally:
        writer.transport.abort()  # at once: an orderly end would wait for the other side


def request_line(host: str, url: SplitResult, settings: FetchSettings) -> tuple[bytes, str]:
    """Return the target of a request, and its Host header; raises `FetchError`."""
    named = f"[{host}]" if ":" in host else host
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    port = url.port or 443
    try:
        return target.encode("ascii"), named if port == 443 else f"{named}:{port}"
    except UnicodeEncodeError:
        raise _not_encoded(settings) from None


async def _get(url: SplitResult, settings: FetchSettings) -> tuple[bytes, str | None]:
    """Return the content, or where it is instead."""
    async with dial(url, settings) as ((reader, writer), host):
        target, named = request_line(host, url, settings)
        headers = [
            ("Host", named),
            ("User-Agent", "wan-tpu"),
            ("Accept", "image/*"),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]
        try:
            request = h11.Request(method="GET", target=target, headers=headers)
        except h11.LocalProtocolError:
            raise _not_encoded(settings) from None
        return await _exchange(reader, writer, host, request, settings)


async def _checked_address(host: str, port: int, settings: FetchSettings) -> str:
    """Return an address of a host; raises unless all of them may be connected to."""
    try:
        found = await settings.resolver(host, port)
    except OSError as error:
        raise FetchError(
            f"the name {host} has no address ({error.strerror or error}); check the {settings.what}'s URL"
        ) from None
    except UnicodeError:
        raise FetchError(f"the {settings.what}'s URL has no valid host name") from None
    for address in found:
        # Which one isn't told: it would say what this network's names resolve to.
        if problem := refusal(address, settings.allowed):
            raise FetchError(f"{host} {problem}; only the public internet is reached")
    if not found:
        raise FetchError(f"the name {host} has no address; check the {settings.what}'s URL")
    return next((address for address in found if ":" not in address), found[0])  # IPv4, if there is


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, request: h11.Request, settings: FetchSettings
) -> tuple[bytes, str | None]:
    protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEADER_BYTES)
    writer.write(protocol.send(request) + protocol.send(h11.EndOfMessage()))
    await writer.drain()
    content = bytearray()
    while True:
        event = protocol.next_event()
        if event is h11.NEED_DATA:
            protocol.receive_data(await reader.read(_CHUNK))
        elif isinstance(event, h11.Response):
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
            if event.status_code in _REDIRECTS and "location" in headers:
                return b"", headers["location"]
            _check_response(event.status_code, headers, host, settings)
        elif isinstance(event, h11.Data):
            content += event.data
            if len(content) > settings.max_bytes:
                raise _too_large(settings)
        elif isinstance(event, h11.EndOfMessage):
            return bytes(content), None
        elif not isinstance(event, h11.InformationalResponse):
            raise FetchError(f"{host} closed the connection before the image was there")


def _check_response(status: int, headers: dict[str, str], host: str, settings: FetchSettings) -> None:
    if status != 200:
        raise FetchError(f"{host} answered with status {status} instead of an image; check the image's URL")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise FetchError(
            f"{host} sent the image in encoding {headers['content-encoding'][:20]!r}, which wasn't asked for"
        )
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > settings.max_bytes:
        raise _too_large(settings)


def _too_large(settings: FetchSettings) -> FetchError:
    return FetchError(
        f"the image has more than {settings.max_bytes} bytes, which is all that is taken; shrink it first"
    )


def _not_encoded(settings: FetchSettings) -> FetchError:
    return FetchError(f"the {settings.what}'s URL has characters that must be percent-encoded; encode them")
