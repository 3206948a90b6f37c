"""HTTPS requests to URLs that clients name, without letting them reach where only this machine can.

https only; every address that a name resolves to is checked, and the connection goes to a checked address itself, so
that a second look-up can't lead elsewhere.
"""

import asyncio
import contextlib
import dataclasses
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import IO, Any
from urllib.parse import urljoin, urlsplit

import httpcore

from actors.api.outbound.addresses import Network, is_address, refusal, resolve
from wan_tpu.errors import InvalidRequest

_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 3
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
    resolver    returns the addresses of a host's name
    trust       certificates that servers are checked against; the system's when left out
    """

    what: str = "image"
    max_bytes: int = 20_000_000
    timeout_s: float = 20.0
    ports: frozenset[int] = frozenset({443})
    allowed: tuple[Network, ...] = ()
    resolver: Callable[[str, int], Awaitable[list[str]]] = resolve
    trust: ssl.SSLContext | None = None


def check_url(url: str, settings: FetchSettings) -> httpcore.URL:
    """Return a URL that may be asked, its addresses not looked up yet; raises `FetchError`."""
    what = settings.what
    try:
        parts = urlsplit(url)
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
        raise _unencoded(settings)
    return httpcore.URL(scheme="https", host=host, port=port, target=target)


@contextlib.asynccontextmanager
async def request(
    method: str, url: str, settings: FetchSettings, headers: Mapping[str, str], content: bytes | None = None
) -> AsyncIterator[httpcore.Response]:
    """Send a request and give the response, its content not read yet; raises `FetchError`. Its time is the caller's."""
    checked = check_url(url, settings)
    host, port = checked.host.decode(), checked.port
    named = f"[{host}]" if ":" in host else host
    common = {"Host": named if port == 443 else f"{named}:{port}", "User-Agent": "wan-tpu", "Connection": "close"}
    try:
        async with (
            httpcore.AsyncConnectionPool(
                ssl_context=settings.trust or ssl.create_default_context(), network_backend=CheckedNetwork(settings)
            ) as pool,
            pool.stream(method, checked, headers=[*common.items(), *headers.items()], content=content) as response,
        ):
            yield response
    except httpcore.LocalProtocolError:
        raise _unencoded(settings) from None
    except httpcore.ConnectError as error:
        if isinstance(cause := error.args[0], ssl.SSLError):
            raise FetchError(f"{host} has no certificate that is trusted ({cause.reason or 'TLS failed'})") from None
        raise FetchError(f"{host} can't be reached ({error})") from None
    except (httpcore.NetworkError, httpcore.ProtocolError) as error:
        raise FetchError(f"{host} did not answer as it should ({type(error).__name__}: {error})") from None


async def fetch(url: str, settings: FetchSettings, into: IO[bytes]) -> None:
    """Write the image at an https URL into a file, each redirect checked anew; raises `FetchError` saying why not."""
    try:
        async with asyncio.timeout(settings.timeout_s):
            for _ in range(_MOST_REDIRECTS + 1):
                async with request("GET", url, settings, _IMAGE) as response:
                    headers = {
                        name.decode("latin-1").lower(): text.decode("latin-1") for name, text in response.headers
                    }
                    if response.status not in _REDIRECTS or "location" not in headers:
                        return await _content(response, headers, settings, into)
                with contextlib.suppress(ValueError):  # what is no URL is refused as what it is
                    headers["location"] = urljoin(url, headers["location"])
                url = headers["location"]
    except TimeoutError:
        raise FetchError(
            f"the image did not come within {settings.timeout_s:g} s; send the file itself as input_reference"
        ) from None
    raise FetchError(f"the image's URL redirects more than {_MOST_REDIRECTS} times; give its last address")


async def _content(
    response: httpcore.Response, headers: dict[str, str], settings: FetchSettings, into: IO[bytes]
) -> None:
    if response.status != 200:
        raise FetchError(f"the image's server answered with status {response.status}; check the image's URL")
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise FetchError(f"the image came in encoding {encoding[:20]!r}, which wasn't asked for")
    announced, size = headers.get("content-length", ""), 0
    async for chunk in response.aiter_stream():
        size += len(chunk)
        if max(size, int(announced) if announced.isdigit() else 0) > settings.max_bytes:
            raise FetchError(
                f"the image has more than {settings.max_bytes} bytes, which is all that is taken; shrink it first"
            )
        into.write(chunk)


def _unencoded(settings: FetchSettings) -> FetchError:
    return FetchError(f"the {settings.what}'s URL has characters that must be percent-encoded; encode them")


class CheckedNetwork(httpcore.AnyIOBackend):
    """The network, of which only public addresses are reached: names are resolved and checked here, and only here."""

    def __init__(self, settings: FetchSettings) -> None:
        self._settings = settings

    async def connect_tcp(self, host: str, port: int, *options: Any, **named: Any) -> httpcore.AsyncNetworkStream:
        """Connect to a checked address of a host; raises `FetchError` unless all of them may be connected to."""
        return await super().connect_tcp(await self._checked_address(host, port), port, *options, **named)

    async def _checked_address(self, host: str, port: int) -> str:
        try:
            found = await self._settings.resolver(host, port)
        except OSError as error:
            raise FetchError(
                f"the name {host} has no address ({error.strerror or error}); check the {self._settings.what}'s URL"
            ) from None
        for address in found:
            # Which one isn't said: it would reveal what this network's names resolve to.
            if problem := refusal(address, self._settings.allowed):
                raise FetchError(f"{host} {problem}; only the public internet is reached")
        if not found:
            raise FetchError(f"the name {host} has no address; check the {self._settings.what}'s URL")
        return next((address for address in found if ":" not in address), found[0])  # IPv4, if there is
