"""Middleware for Serve's own proxy without HAProxy: it applies the same limits, as far as a middleware can.

Serve's proxy reads whole bodies into memory as fast as they arrive, and so does the replica behind it. This middleware
counts and paces them until their request ends. A middleware sees a request only when its headers are complete, so it
can't limit connections that send nothing, or that send their headers slowly.
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
from actors.api.http.lingering import end_answer
from actors.api.intake.receiving import Bodies, IncomingRequest
from actors.api.limits import ServiceLimits
from cluster.provision.haproxy import BOUNDS, KEY, REQUEST_ID, REQUEST_ID_HEADER, SERVES_HEADERS

_AGAIN_S = 2
_WINDOW_S = 10.0  # The window in which `BOUNDS` count requests.
_NAMES = 10_000  # When more addresses and keys than this are remembered, idle ones are forgotten.


def middlewares() -> list[Middleware]:
    """Return the middleware for Serve's proxy: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this function.

    Behind HAProxy there is none. WAN_TPU_LIMITS holds `ServiceLimits` as "name=number", separated by spaces.

    Raises:
        InvalidInput: WAN_TPU_LIMITS is invalid.
    """
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        return []
    return [Middleware(ProxyLimits, limits=ServiceLimits.parse(os.environ.get("WAN_TPU_LIMITS", "").split()))]


class ProxyLimits:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, limits: ServiceLimits) -> None:
        self._app, self._limits, self._bodies = app, limits, Bodies(limits)
        self._clients = _Clients({name: int(os.environ.get(name, value)) for name, value in BOUNDS.items()})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, unless it is rejected."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = {**scope, "headers": [header for header in scope["headers"] if not _is_unwanted(*header)]}
        headers = Headers(scope=scope)
        address, key = _group_address((scope.get("client") or ("",))[0]), _normalize_key(headers.get("authorization"))
        exchange = _Exchange(receive, send, self._limits.small_bytes)
        with_body = "content-length" in headers or "transfer-encoding" in headers
        try:
            with self._clients.count(address, key), exchange.counted:
                if with_body:
                    exchange.body = exchange.counted.enter_context(self._bodies.admit(headers, key or address))
                await self._app(scope, exchange.receive, exchange.send)
            exchange.check()
        except HttpError as error:
            if exchange.has_begun:  # Part of an answer has been sent, so no other answer is possible.
                return
            refusal = answer(error)
            if not with_body:
                await refusal(scope, receive, send)
                return
            refusal.headers["connection"] = "close"  # Otherwise the whole unwanted body would still arrive.
            await send({"type": "http.response.start", "status": refusal.status_code, "headers": refusal.raw_headers})
            await end_answer({"type": "http.response.body", "body": refusal.body}, receive, send)


def _is_unwanted(name: bytes, value: bytes) -> bool:
    """Return whether a header would change how Serve treats a request, or be an id that no answer should repeat."""
    known = name.decode("latin-1").lower()
    if known == REQUEST_ID_HEADER:
        return REQUEST_ID.fullmatch(value.decode("latin-1")) is None
    return SERVES_HEADERS.fullmatch(known) is not None


def _normalize_key(authorization: str | None) -> str | None:
    """Return the key in a header. Text around it, such as spaces, doesn't make it another key."""
    match = KEY.search(authorization or "")
    return authorization if match is None else match[0]


def _group_address(address: str) -> str:
    """Return the group in which an address is counted: for IPv6 its /64, which belongs to one client."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4 or parsed.ipv4_mapped is not None:
        return str(parsed if parsed.version == 4 else parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


class _Exchange:
    """A request as it is received, and its answer as it is sent.

    Attributes:
        begun: Whether the answer has begun.
        body: The request's share of the memory, if it has a body.
        counted: Stops counting the body when this is closed; a small body is counted only until it has arrived.
    """

    def __init__(self, receive: Receive, send: Send, small: int) -> None:
        self._receive, self._send, self._small = receive, send, small
        self.has_begun = self._is_unavailable = False
        self.body: IncomingRequest | None = None
        self.counted = contextlib.ExitStack()
        self._failure: HttpError | None = None

    async def receive(self) -> Message:
        """Return the next part of the body. If the body must not go on, tell Serve that the client has disconnected."""
        body = self.body
        if body is None or body.arrived:
            return await self._receive()
        try:
            message = await body.receive_part(self._receive, lambda message: len(message.get("body", b"")))
        except HttpError as error:
            self._failure = error
            return {"type": "http.disconnect"}
        body.arrived = not message.get("more_body", False)
        if body.arrived and body.size <= self._small:
            self.counted.close()
        return message

    async def send(self, message: Message) -> None:
        """Pass an answer on, except Serve's own answers in place of an application's, which aren't JSON."""
        if message["type"] == "http.response.start":
            kind = Headers(raw=message.get("headers", [])).get("content-type", "")
            self._is_unavailable = kind.startswith("text/plain") and (
                message["status"] == 404 or message["status"] >= 500
            )
        if not self._is_unavailable and self._failure is None:
            self.has_begun = True
            await self._send(message)

    def check(self) -> None:
        """Raise the error to answer with instead of an answer of Serve's that was held back, if there is one."""
        if self._failure is not None:
            raise self._failure
        if self._is_unavailable:
            message = "the service is starting or restarting; try again"
            raise HttpError(503, message, code="unavailable", after_s=_AGAIN_S)


class _Clients:
    """The rates and concurrent requests of clients, by address and by presented key."""

    def __init__(self, bounds: Mapping[str, int]) -> None:
        self._at_once, self._requests, self._of_a_key, self._of_a_key_at_once = bounds.values()
        self._under_way: dict[str, int] = defaultdict(int)
        self._used_until: dict[str, float] = {}  # The time until which a client's rate is used up.

    @contextlib.contextmanager
    def count(self, address: str, key: str | None) -> Iterator[None]:
        """Count a request until the block ends; raises `HttpError` 429 if there are too many."""
        bounds_by_name = {address: (self._requests, self._at_once)}
        if key is not None:
            bounds_by_name[f"key {key}"] = (self._of_a_key, self._of_a_key_at_once)
        for name, bounds in bounds_by_name.items():
            if wait_s := self._wait_s(name, *bounds):
                message = "too many concurrent or recent requests; try again later"
                raise HttpError(429, message, code="rate_limit_exceeded", after_s=math.ceil(wait_s))
        for name in bounds_by_name:
            self._under_way[name] += 1
        try:
            yield
        finally:
            for name in bounds_by_name:
                self._under_way[name] -= 1
                if not self._under_way[name]:
                    del self._under_way[name]

    def _wait_s(self, name: str, requests: int, at_once: int) -> float:
        """Count a request and return 0; or if it must be rejected, return after how many seconds one may be sent."""
        if at_once and self._under_way.get(name, 0) >= at_once:
            return _AGAIN_S
        if not requests:
            return 0
        now = asyncio.get_running_loop().time()
        if len(self._used_until) > _NAMES:
            self._used_until = {other: then for other, then in self._used_until.items() if then > now - _WINDOW_S}
        used = max(self._used_until.get(name, 0.0), now - _WINDOW_S) + _WINDOW_S / requests
        if used > now:
            return used - now
        self._used_until[name] = used
        return 0
