"""What stands in Serve's own proxy where there is no HAProxy: the same bounds, as far as it can hold them.

Serve's proxy reads whole bodies into its memory, faster than anybody wants them, and so does a replica behind it. Here
they are counted, and paced, until their request ends. What it can't do, since it sees requests only: bound connections
that ask nothing, and headers that take for ever.
"""

import asyncio
import contextlib
import ipaddress
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.api.http.error_answers import HttpError, answer
from actors.api.intake.receiving import Arriving, Bodies
from actors.api.limits import Limits
from cluster.provision.haproxy import BOUNDS, KEY, SERVES_HEADERS

_AGAIN_S = 2
_WINDOW_S = 10.0  # for which `BOUNDS` count requests
_NAMES = 10_000  # of addresses and keys that are remembered, before those that don't ask any more are forgotten


def middlewares() -> list[Middleware]:
    """Return what Serve's proxy puts before its applications: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this.

    Behind HAProxy, nothing. WAN_TPU_LIMITS are `Limits`, as "name=number" with spaces between; raises `InvalidInput`.
    """
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        return []
    return [Middleware(ProxyLimits, limits=Limits.of(os.environ.get("WAN_TPU_LIMITS", "").split()))]


class ProxyLimits:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._limits, self._bodies = app, limits, Bodies(limits)
        self._askers = _Askers({name: int(os.environ.get(name, value)) for name, value in BOUNDS.items()})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, unless it is refused."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = {**scope, "headers": [header for header in scope["headers"] if not _is_serves(header[0])]}
        headers = Headers(scope=scope)
        address, key = _network((scope.get("client") or ("",))[0]), _key(headers.get("authorization"))
        exchange = _Exchange(receive, send, self._limits.small_bytes)
        with_body = "content-length" in headers or "transfer-encoding" in headers
        try:
            with self._askers.one(address, key), exchange.counted:
                if with_body:
                    exchange.body = exchange.counted.enter_context(self._bodies.arriving(headers, key or address))
                await self._app(scope, exchange.receive, exchange.send)
            exchange.check()
        except HttpError as error:
            if exchange.begun:  # half an answer is out
                return
            refusal = answer(error)
            if with_body:
                refusal.headers["connection"] = "close"  # or all of a body that nobody wants would come still
            await refusal(scope, receive, send)


def _is_serves(name: bytes) -> bool:
    """Whether a header would change how Serve treats a request."""
    return SERVES_HEADERS.fullmatch(name.decode("latin-1").lower()) is not None


def _key(authorization: str | None) -> str | None:
    """Return the key that is shown, whatever stands around it: spaces make no other key of it."""
    found = KEY.search(authorization or "")
    return authorization if found is None else found[0]


def _network(address: str) -> str:
    """Return what counts as one address: of IPv6 a /64, all of whose addresses are one client's."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4 or parsed.ipv4_mapped is not None:
        return str(parsed if parsed.version == 4 else parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


class _Exchange:
    """A request as it is received, and its answer as it is sent.

    body     its body, if it has one, which is counted until `counted` is closed: for a small one when it is there
    """

    def __init__(self, receive: Receive, send: Send, small: int) -> None:
        self._receive, self._send, self._small = receive, send, small
        self.begun = self._away = False
        self.body: Arriving | None = None
        self.counted = contextlib.ExitStack()
        self._failure: HttpError | None = None

    async def receive(self) -> Message:
        """Return the next part; to Serve, one whose body may not go on has hung up."""
        body = self.body
        if body is None or body.arrived:
            return await self._receive()
        try:
            message = await body.part(self._receive, lambda message: len(message.get("body", b"")))
        except HttpError as error:
            self._failure = error
            return {"type": "http.disconnect"}
        body.arrived = not message.get("more_body", False)
        if body.arrived and body.size <= self._small:
            self.counted.close()
        return message

    async def send(self, message: Message) -> None:
        """Pass an answer on; what Serve says in an application's place, which isn't JSON, is kept back."""
        if message["type"] == "http.response.start":
            kind = Headers(raw=message.get("headers", [])).get("content-type", "")
            self._away = kind.startswith("text/plain") and (message["status"] == 404 or message["status"] >= 500)
        if not self._away and self._failure is None:
            self.begun = True
            await self._send(message)

    def check(self) -> None:
        """Raise what is to be said in place of an answer."""
        if self._failure is not None:
            raise self._failure
        if self._away:
            message = "the service is starting, or coming back; try again"
            raise HttpError(503, message, code="unavailable", after_s=_AGAIN_S)


class _Askers:
    """Who asks, how often and how much at once: addresses, and keys as they are shown."""

    def __init__(self, bounds: Mapping[str, int]) -> None:
        self._at_once, self._requests, self._of_a_key, self._of_a_key_at_once = bounds.values()
        self._asking: dict[str, int] = defaultdict(int)
        self._used: dict[str, float] = {}  # until when what may be asked is used up

    @contextlib.contextmanager
    def one(self, address: str, key: str | None) -> Iterator[None]:
        """Count a request until the block ends; raises `HttpError` 429 for one too many."""
        asking = {address: (self._requests, self._at_once)}
        if key is not None:
            asking[f"key {key}"] = (self._of_a_key, self._of_a_key_at_once)
        for asker, bounds in asking.items():
            if wait_s := self._wait_s(asker, *bounds):
                message = "too many requests at once, or lately; send fewer"
                raise HttpError(429, message, code="rate_limit_exceeded", after_s=math.ceil(wait_s))
        for name in asking:
            self._asking[name] += 1
        try:
            yield
        finally:
            for name in asking:
                self._asking[name] -= 1
                if not self._asking[name]:
                    del self._asking[name]

    def _wait_s(self, name: str, requests: int, at_once: int) -> float:
        """Count a request; return 0, or where it may not pass in how many seconds one may."""
        if at_once and self._asking.get(name, 0) >= at_once:
            return _AGAIN_S
        if not requests:
            return 0
        now = asyncio.get_running_loop().time()
        if len(self._used) > _NAMES:
            self._used = {other: then for other, then in self._used.items() if then > now - _WINDOW_S}
        used = max(self._used.get(name, 0.0), now - _WINDOW_S) + _WINDOW_S / requests
        if used > now:
            return used - now
        self._used[name] = used
        return 0
