"""Around every request: strangers' pages get nothing, each answer has an id, is counted and logged."""

import logging
import re
import secrets
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.api.http.content import DownloadCut
from actors.api.http.error_answers import HttpError, answer
from actors.api.http.service import Service
from actors.observe.logs import log_event

log = logging.getLogger(__name__)

_QUIET = ("/health", "/ready", "/metrics")  # asked every few seconds by machines
_WAYS = ("http", "https")
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))  # Others are counted as one.
_MAX_UNREAD = 65_536  # Bytes of a body that nobody wants, which the server still takes to keep the connection.
# On every answer. Only our own page allows anything at all, and says so itself.
_GUARDS = {"x-content-type-options": "nosniff", "x-frame-options": "DENY"}
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


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
        start, status, read = time.perf_counter(), 0, False
        headers = Headers(scope=scope)
        method, state = scope["method"], scope.setdefault("state", {})
        state["request_id"] = _request_id(headers)
        scope = _as_routed(scope)

        async def received() -> Message:
            nonlocal read
            message = await receive()
            read = not message.get("more_body", False)
            return message

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = _GUARDS | {"x-request-id": state["request_id"]} | state.get("headers", {})
                if not read and _is_long(headers, _MAX_UNREAD if status < 400 else 0):
                    more["connection"] = "close"  # or all of a body that nobody wants would come still
                given = message.get("headers", [])
                added = [(name.lower().encode(), value.encode("latin-1")) for name, value in more.items()]
                names = {name for name, _ in added}
                message["headers"] = [header for header in given if header[0].lower() not in names] + added
                self._count(scope, method, status, time.perf_counter() - start)
            elif method == "HEAD":
                message = {"type": "http.response.body", "body": b"", "more_body": message.get("more_body", False)}
            await send(message)

        try:
            if len(headers.getlist("authorization")) > 1:  # Each proxy before this may count the request for another.
                raise HttpError(400, "more than one Authorization header was sent; send one", code="invalid_value")
            self._check_site(headers)
            await self._app(scope, received, observed)
        except DownloadCut as error:  # The server closes the connection of an answer that isn't whole.
            log_event(log, "download cut", job=_job_of(scope), request=state["request_id"], reason=str(error))
        except Exception as error:  # whatever it is: the process goes on
            if status:  # half an answer is out
                raise
            await answer(error, state["request_id"])(scope, receive, observed)

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
        # Who follows a link navigates to a document. Pictures, scripts and frames of another site's page get nothing.
        aim = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest", "document")
        elsewhere = headers.get("sec-fetch-site") == "cross-site" and aim != ("navigate", "document")
        foreign = origin not in (None, *self._settings.origins, *(f"{way}://{headers['host']}" for way in _WAYS))
        if foreign or (origin is None and elsewhere):
            raise HttpError(403, "pages of other sites may not use this service", code="wrong_origin")

    def _count(self, scope: Scope, method: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        # A label's values come from closed sets: strangers would make as many series as they can invent names.
        counted = method if method in _METHODS else "other"
        self._service.meters.http.labels(counted if route != "none" else "none", route, str(status)).observe(seconds)
        if route in _QUIET:
            return
        facts = scope.get("state") or {}
        log_event(
            log,
            "http",
            logging.DEBUG if method in ("GET", "HEAD") and status < 400 else logging.INFO,
            method=counted,
            route=route,
            status=status,
            ms=round(seconds * 1000, 1),
            job=_job_of(scope),
            owner=facts.get("owner") or None,
            request=facts["request_id"],
        )


def _job_of(scope: Scope) -> str | None:
    """Return the id of the job that a request is about, if it is about one."""
    named: str | None = (scope.get("path_params") or {}).get("video_id")
    return named or (scope.get("state") or {}).get("job")


def _as_routed(scope: Scope) -> Scope:
    """Return a request as routes know it: a HEAD as the GET whose head is wanted, no slash at the end."""
    path = scope["path"]
    path = path.rstrip("/") if path.startswith("/v1/") else path
    routed = {"path": path}
    if scope["method"] == "HEAD" and not path.endswith("/events"):  # which end with the job
        routed |= {"method": "GET", "head": True}
    return {**scope, **routed}


def _is_long(headers: Headers, most: int) -> bool:
    """Whether a request has a body of more than so many bytes, or of a length that nobody knows."""
    length = headers.get("content-length", "0")
    return "transfer-encoding" in headers or not length.isdecimal() or int(length[:20]) > most


def _request_id(headers: Headers) -> str:
    """Return the id of a request: what its client or a proxy has given it, if that can be shown."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


def _name(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host
