"""Middleware for every request: reject other sites' pages, give the answer an id, count it and log it."""

import asyncio
import logging
import re
import secrets
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.api.core.errors import HttpError
from actors.api.core.service import Service
from actors.api.http.content import DownloadCut
from actors.api.http.error_answers import answer
from actors.observe.logs import log_event

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)  # As in cluster/provision/haproxy.cfg.
_QUIET = ("/health", "/ready", "/metrics")  # Machines request these every few seconds, so they aren't logged.
_SCHEMES = ("http", "https")
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))  # Others are counted as "other".
_LINGER_S = 5.0  # The longest time for which the rest of a body is read.
_IDLE_S = 1.0  # The longest wait for the next part of a body, which allows for the time an answer is under way.
_MAX_UNREAD = 65_536  # The most bytes of a rejected body that the server still reads to keep the connection.
# Sent with every answer. Only our own web page needs to allow more, and it has a policy of its own.
_GUARDS = {"x-content-type-options": "nosniff", "x-frame-options": "DENY"}


class Middleware:
    """ASGI middleware.

    While no key is required, only requests to certain host names are answered. Otherwise another site's page, open in a
    browser on this machine, could use the service, even through a name of its own that resolves here (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service, self._settings = app, service, service.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, unless it is rejected."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status, read, closes = time.perf_counter(), 0, False, False
        headers = Headers(scope=scope)
        method, state = scope["method"], scope.setdefault("state", {})
        state["request_id"] = _choose_request_id(headers)
        scope = _normalize(scope)

        async def receive_noting_end() -> Message:
            nonlocal read
            message = await receive()
            read = not message.get("more_body", False)
            return message

        async def send_observed(message: Message) -> None:
            nonlocal status, closes
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = _GUARDS | {REQUEST_ID_HEADER: state["request_id"]} | state.get("headers", {})
                if not read and _is_long(headers, _MAX_UNREAD if status < 400 else 0):
                    extra["connection"], closes = "close", True  # Otherwise the whole unwanted body would still arrive.
                original = message.get("headers", [])
                added = [(name.lower().encode(), value.encode("latin-1")) for name, value in extra.items()]
                names = {name for name, _ in added}
                message["headers"] = [header for header in original if header[0].lower() not in names] + added
                self._count(scope, method, status, time.perf_counter() - start)
            elif method == "HEAD":
                message = {"type": "http.response.body", "body": b"", "more_body": message.get("more_body", False)}
            if closes and message["type"] == "http.response.body" and not message.get("more_body", False):
                await _end_answer(message, receive, send)
            else:
                await send(message)

        try:
            if len(headers.getlist("authorization")) > 1:  # Proxies might attribute the request to different keys.
                raise HttpError(400, "more than one Authorization header was sent; send one", code="invalid_value")
            self._check_site(headers)
            await self._app(scope, receive_noting_end, send_observed)
        except DownloadCut as error:  # The server closes the connection, because the answer is incomplete.
            log_event(log, "download cut", job=_find_job(scope), request=state["request_id"], reason=str(error))
        except Exception as error:  # No error of a request may end the process.
            if status:  # Part of an answer has been sent, so no other answer is possible.
                raise
            await answer(error, state["request_id"])(scope, receive, send_observed)

    def _check_site(self, headers: Headers) -> None:
        if self._service.access.required:
            return
        if _strip_port(headers.get("host", "")) not in self._settings.names:
            allowed = ", ".join(self._settings.names)
            raise HttpError(
                421,
                f"this service has no API keys, so it accepts only requests for {allowed}; use that address, or add "
                "a key",
                code="wrong_host",
            )
        origin = headers.get("origin")
        # Following a link navigates to a document, which is allowed. Images, scripts and frames of other sites aren't.
        aim = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest", "document")
        elsewhere = headers.get("sec-fetch-site") == "cross-site" and aim != ("navigate", "document")
        foreign = origin not in (None, *self._settings.origins, *(f"{way}://{headers['host']}" for way in _SCHEMES))
        if foreign or (origin is None and elsewhere):
            raise HttpError(
                403,
                "pages of other sites may not use this service; call it from its own pages, or from a server",
                code="wrong_origin",
            )

    def _count(self, scope: Scope, method: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        # Label values come from closed sets. Otherwise clients could create any number of series.
        label = method if method in _METHODS else "other"
        meter = self._service.presence.meters.http
        meter.labels(label if route != "none" else "none", route, str(status)).observe(seconds)
        if route in _QUIET:
            return
        facts = scope.get("state") or {}
        log_event(
            log,
            "http",
            logging.DEBUG if method in ("GET", "HEAD") and status < 400 else logging.INFO,
            method=label,
            route=route,
            status=status,
            ms=round(seconds * 1000, 1),
            job=_find_job(scope),
            owner=facts.get("owner") or None,
            request=facts["request_id"],
        )


class OneRequestId:
    """ASGI middleware under Ray Serve, which gives every request an id, and adds it to every answer again."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its answer without the id."""

        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [header for header in message["headers"] if header[0].lower() != REQUEST_ID_HEADER.encode()]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_without_id)


async def _end_answer(message: Message, receive: Receive, send: Send) -> None:
    """Send the last part of an answer, and read what the client still sends before the server closes the connection.

    When a server closes a connection with unread bytes, the kernel resets it. A reset discards what the client hasn't
    read yet, which is the answer, because many clients read only after they have sent everything. So the rest of the
    body is read and discarded for a while (nginx calls this `lingering_close`).
    """
    await send({**message, "more_body": True})
    try:
        async with asyncio.timeout(_LINGER_S):
            while True:
                received = await asyncio.wait_for(receive(), _IDLE_S)
                if received["type"] != "http.request" or not received.get("more_body", False):
                    break
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})


def _find_job(scope: Scope) -> str | None:
    """Return the id of the job that a request refers to, if any."""
    job: str | None = (scope.get("path_params") or {}).get("video_id")
    return job or (scope.get("state") or {}).get("job")


def _normalize(scope: Scope) -> Scope:
    """Return a request in the form that routes expect: HEAD as GET, without a trailing slash."""
    path = scope["path"]
    path = path.rstrip("/") if path.startswith("/v1/") else path
    changes = {"path": path}
    if scope["method"] == "HEAD" and not path.endswith("/events"):  # Event streams end only with the job.
        changes |= {"method": "GET", "head": True}
    return {**scope, **changes}


def _is_long(headers: Headers, most: int) -> bool:
    """Return whether a request's body is longer than `most` bytes, or of unknown length."""
    length = headers.get("content-length", "0")
    return "transfer-encoding" in headers or not length.isdecimal() or int(length[:20]) > most


def _choose_request_id(headers: Headers) -> str:
    """Return the id of a request: that of its client or a proxy if it is printable, else a new one."""
    client_id = headers.get(REQUEST_ID_HEADER, "")
    return client_id if _REQUEST_ID.fullmatch(client_id) else f"req_{secrets.token_hex(12)}"


def _strip_port(host: str) -> str:
    """Return the host of a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host
