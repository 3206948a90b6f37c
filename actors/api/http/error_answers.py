"""Turn errors into answers with OpenAI's error body. The status depends on the type of the error."""

import logging

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from actors.api.core.create_video import NAMES
from actors.api.core.errors import HttpError
from actors.api.http.objects import make_error_body
from actors.jobs.errors import (
    IdempotencyConflict,
    JobError,
    JobNotFound,
    JobUnfinished,
    StoredTooMuch,
    StoreError,
    StoreUnavailable,
)
from actors.observe.logs import log_event
from wan_tpu.errors import InvalidInput, InvalidRequest
from wan_tpu.storage.base import Missing, NoSpace, Refused, StorageError

log = logging.getLogger(__name__)
_AGAIN_S = 5  # Retry-After of a service that is unavailable.


def answer(error: Exception, request_id: str = "") -> Response:
    """Return the answer for an error. For an unexpected error it contains only the `request_id` of the log entry."""
    message, headers = str(error), {}
    code: str | None
    status, code, param = 500, "internal_error", None
    match error:
        case HttpError():
            status, code, param, headers = error.status, error.code, error.param, error.headers
        case JobNotFound():
            status, code = 404, "video_not_found"
        case IdempotencyConflict():
            status, code = 409, "idempotency_conflict"
        case JobUnfinished():
            status, code = 409, "video_in_progress"
        case Refused() | StoreError() if not isinstance(error, Missing):
            # Whatever the client does, this stays until the operator has changed something.
            status, code, headers = 503, "misconfigured", {"x-should-retry": "false"}
            log_event(log, "misconfigured", logging.ERROR, reason=message)
            message = "the service's database or storage refuses it; its operator finds the reason in its log"
        case StoreUnavailable() | StorageError():
            status, code, headers["Retry-After"] = 503, "unavailable", str(_AGAIN_S)
            log_event(log, "unavailable", logging.WARNING, reason=message)
            message = "the service can't reach its database or storage now; try again"  # Hides internal addresses.
            if isinstance(error, NoSpace):
                message, code = "the service's disk is full; try again once its operator has freed some", "no_space"
        case StoredTooMuch():
            status, code = 403, "storage_full"
        case JobError():
            status, code = 409, "conflict"
        case InvalidRequest():
            status, code = 400, "invalid_value"
            param = "size" if error.field in ("height", "width") else NAMES.get(error.field or "", error.field)
            if error.field in NAMES:  # The message has only the internal name of the field, so the API's is added.
                message = f"{param}: {message}"
        case InvalidInput():
            status, code = 400, "invalid_value"
        case RequestValidationError():
            first = error.errors()[0]
            param = ".".join(str(part) for part in first["loc"][1:])[:80] or None
            status, code, message = 400, "invalid_value", f"{param}: {first['msg']}"
        case HTTPException():
            status, code, message = error.status_code, None, str(error.detail)
            headers |= dict(error.headers or {})
        case ClientDisconnect():
            status, code, message = 499, None, "the client hung up"
        case _:
            message = f"the service failed; its log says why, under {request_id}"
            log.error("failed", exc_info=error, extra={"fields": {"request": request_id}})
    body = make_error_body(status, message, code=code, param=param)
    return Response(body.model_dump_json(), status, headers, "application/json")


async def _handle(_: Request, error: Exception) -> Response:
    return answer(error)


# For errors that are raised on purpose. `Middleware` handles all others.
HANDLERS = dict.fromkeys(
    (HttpError, JobError, StorageError, InvalidInput, RequestValidationError, HTTPException), _handle
)
