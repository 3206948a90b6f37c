"""FastAPI dependencies of the routes: the service, the caller, and values from headers and paths."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Header, Path, Query, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from actors.api.core.access import Caller
from actors.api.core.errors import HttpError
from actors.api.core.service import Service
from actors.api.http.objects import Variant
from actors.jobs.keys import MAKE, OPERATE, READ
from wan_tpu.errors import InvalidRequest

_KEY_LENGTH = 255
_NO_BODY = 1024  # The largest body that routes without a body ignore rather than reject, as some clients send {}.


async def get_service(request: Request) -> Service:
    """Return the application's service."""
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(get_service)]
_BEARER = HTTPBearer(
    auto_error=False, description="A key of `wan-tpu keys add`; any text where the service has no keys."
)


def require_scopes(*scopes: str, body: bool = False) -> Callable[..., Coroutine[Any, Any, Caller]]:
    """Return a dependency that admits callers whose key has one of the scopes; it raises `HttpError`.

    Args:
        scopes: The scopes of which a key must have one.
        body: Whether the route reads a body. If not, requests with a body are rejected.
    """

    async def admit(
        request: Request,
        service: Served,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)],
    ) -> Caller:
        if not body:
            refuse_body(request)
        try:
            known_caller = service.access.admit(None if credentials is None else credentials.credentials, scopes)
        except HttpError as error:
            if body and error.status == 429 and not service.intake.retries.repeats(request):
                service.intake.retries.refuse(request)
            raise
        request.state.owner, request.state.headers = known_caller.owner, known_caller.rate
        return known_caller

    return admit


def refuse_body(request: Request) -> None:
    """Raise `HttpError` 413 for a request with a body to a route that takes none."""
    length = request.headers.get("content-length", "0")
    small = length.isascii() and length.isdigit() and int(length[:20]) <= _NO_BODY
    if "transfer-encoding" in request.headers or not small:
        message = f"this route takes no body; send none, or at most {_NO_BODY} bytes, which are ignored"
        raise HttpError(413, message, code="too_large", headers={"Connection": "close"})


Maker = Annotated[Caller, Depends(require_scopes(MAKE, body=True))]
Watcher = Annotated[Caller, Depends(require_scopes(READ, OPERATE))]
AnyCaller = Annotated[Caller, Depends(require_scopes(MAKE, READ, OPERATE, body=True))]
Ender = Annotated[Caller, Depends(require_scopes(MAKE, OPERATE))]


_ONCE = "A random text: the same key and body is the same video, however often it is sent; another body is refused."


def _check_idempotency_key(
    idempotency_key: Annotated[str | None, Header(max_length=_KEY_LENGTH, description=_ONCE)] = None,
) -> str | None:
    if idempotency_key is not None and (not idempotency_key.isprintable() or not idempotency_key):
        raise InvalidRequest("the Idempotency-Key is empty or has control characters; give a random one")
    return idempotency_key


IdempotencyKey = Annotated[str | None, Depends(_check_idempotency_key)]
SegmentNumber = Annotated[int, Path(ge=1, description="The segment's number, counted from 1.", examples=[2])]
VideoId = Annotated[str, Path(description="The video's `id`.", examples=["video_" + "0" * 48])]
Which = Annotated[Variant, Query(description="The video, a picture of it, or an image that it was asked for with.")]
