"""Around every request: bodies end where they must, strangers' pages get nothing, each answer is counted and logged."""

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from actors.api.failures import Problem, answer
from actors.api.logs import told
from actors.api.metrics import Meters

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_QUIET = ("/health", "/ready", "/metrics")  # asked every few seconds by machines


class Guard:
    """ASGI middleware.

    names    under which the service may be asked, None for any: without keys, a page of another site that a browser
             here has open could otherwise ask through it, also by a name of its own that leads here (DNS rebinding)
    origins  of pages that may ask all the same
    """

    def __init__(
        self, app: Any, *, body_bytes: int, names: tuple[str, ...] | None, origins: tuple[str, ...], meters: Meters
    ) -> None:
        self._app, self._body_bytes, self._names, self._meters = app, body_bytes, names, meters
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, unless it is refused."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def observed(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-content-type-options", b"nosniff")]
                self._count(scope, status, time.perf_counter() - start)
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check_site(headers)
            await self._app(scope, self._limited(receive, headers), observed)
        except Exception as error:  # whatever it is: the process goes on
            if status:  # half an answer is out
                raise
            await answer(error)(scope, receive, observed)

    def _check_site(self, headers: Headers) -> None:
        if self._names is None:
            return
        if _name(headers.get("host", "")) not in self._names:
            allowed = ", ".join(self._names)
            raise Problem(
                421,
                f"this service has no keys and is asked under another name; use {allowed}, or start it with keys",
                code="wrong_host",
            )
        origin = headers.get("origin")
        # Who only follows a link here has the mode "navigate"; pictures and scripts of a page there have none of ours.
        elsewhere = headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate"
        if (origin is None and elsewhere) or (
            origin not in (None, *self._origins) and urlsplit(origin).netloc != headers.get("host")
        ):
            raise Problem(403, "pages of other sites may not use this service", code="wrong_origin")

    def _limited(self, receive: Receive, headers: Headers) -> Receive:
        length, taken = headers.get("content-length", ""), 0
        if length.isdigit() and int(length) > self._body_bytes:
            raise self._too_large()

        async def counted() -> MutableMapping[str, Any]:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._body_bytes:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> Problem:
        return Problem(413, f"the body has more than {self._body_bytes} bytes; send a smaller image", code="too_large")

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self._meters.http.labels(scope["method"] if route != "none" else "none", route, str(status)).observe(seconds)
        if route in _QUIET:
            return
        asked = scope.get("path_params") or {}
        facts = getattr(scope.get("state"), "_state", None) or scope.get("state") or {}
        told(
            log,
            "http",
            logging.DEBUG if scope["method"] == "GET" and status < 400 else logging.INFO,
            method=scope["method"],
            route=route,
            status=status,
            ms=round(seconds * 1000, 1),
            job=asked.get("video_id", facts.get("job")),
            owner=facts.get("owner") or None,
        )


def _name(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host
