"""Around every request: bodies end where they must, strangers' pages get nothing, each answer is counted and logged."""

import logging
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.api.http.error_answers import HttpError, answer
from actors.api.http.service import Service
from actors.observe.logs import log_event

log = logging.getLogger(__name__)

_QUIET = ("/health", "/ready", "/metrics")  # asked every few seconds by machines


class Middleware:
    """ASGI middleware.

    While no key is required, only hosts of certain names are answered: a page of another site, open in a browser here,
    could otherwise ask through it, also by a name of its own that leads here (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service, self._settings = app, service, service.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, unless it is refused."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def observed(message: Message) -> None:
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
        if self._service.access.required:
            return
        if _name(headers.get("host", "")) not in self._settings.names:
            allowed = ", ".join(self._settings.names)
            raise HttpError(
                421,
                f"this service has no keys and is asked under another name; use {allowed}, or start it with keys",
                code="wrong_host",
            )
        origin = headers.get("origin")
        # Who only follows a link here has the mode "navigate"; pictures and scripts of a page there have none of ours.
        elsewhere = headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate"
        foreign = origin not in (
            None,
            *self._settings.origins,
            f"http://{headers['host']}",
            f"https://{headers['host']}",
        )
        if foreign or (origin is None and elsewhere):
            raise HttpError(403, "pages of other sites may not use this service", code="wrong_origin")

    def _limited(self, receive: Receive, headers: Headers) -> Receive:
        length, taken = headers.get("content-length", ""), 0
        if length.isdigit() and int(length) > self._settings.body_bytes:
            raise self._too_large()

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._settings.body_bytes:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> HttpError:
        return HttpError(
            413, f"the body has more than {self._settings.body_bytes} bytes; send a smaller image", code="too_large"
        )

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self._service.meters.http.labels(scope["method"] if route != "none" else "none", route, str(status)).observe(
            seconds
        )
        if route in _QUIET:
            return
        asked = scope.get("path_params") or {}
        facts = scope.get("state") or {}
        log_event(
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
