"""What goes wrong, as answers: OpenAI's error body, and a status by the type of the error."""

import logging

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from actors.api.access import TooMany, UnknownKey
from actors.api.admission import NotReady
from actors.api.logs import told
from actors.api.objects import CreateVideo, error_body
from actors.jobs.errors import IdempotencyConflict, JobError, JobNotFound, JobUnfinished, QueueFull, StoreUnavailable
from actors.storage import StorageError
from wan_tpu.errors import InvalidInput, InvalidRequest

log = logging.getLogger(__name__)

# Fields of a request by the API's name; of a size, a message is about one side.
_RENAMED = {"frames": "num_frames", "steps": "num_inference_steps", "image": "input_reference"}
_FIELDS = {name: name for name in CreateVideo.model_fields} | _RENAMED | {"height": "size", "width": "size"}
_AGAIN_S = 5  # after which a service that can't answer now may be asked again


class Problem(Exception):
    """An answer that isn't a success, and has no exception of its own."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class Busy(Problem):
    """Come back later."""

    def __init__(self, message: str, retry_after_s: int, *, status: int = 429, code: str = "queue_full") -> None:
        super().__init__(status, message, code=code)
        self.retry_after_s = retry_after_s


def answer(error: Exception) -> Response:
    """Return the answer to an error."""
    message, headers = str(error), {}
    code: str | None
    status, code, param = 500, "internal_error", getattr(error, "param", None)
    match error:
        case Problem():
            status, code = error.status, error.code
            if isinstance(error, Busy):
                headers["Retry-After"] = str(error.retry_after_s)
        case UnknownKey():
            status, code, headers["WWW-Authenticate"] = 401, "invalid_api_key", "Bearer"
        case TooMany():
            status, code, headers["Retry-After"] = 429, "rate_limit_exceeded", str(max(1, round(error.retry_after_s)))
        case JobNotFound():
            status, code = 404, "video_not_found"
        case IdempotencyConflict():
            status, code = 409, "idempotency_conflict"
        case JobUnfinished():
            status, code = 409, "video_in_progress"
        case NotReady() | StoreUnavailable() | StorageError() | QueueFull():
            status, code, headers["Retry-After"] = 503, "unavailable", str(_AGAIN_S)
            told(log, "unavailable", logging.WARNING, reason=message)
            if not isinstance(error, NotReady):  # paths and addresses are the operator's
                message = "the service can't reach its database or storage now; try again"
        case JobError():
            status, code = 409, "conflict"
        case InvalidRequest():
            status, code = 400, "invalid_value"
            if param is None:
                message, param = _of_this_api(message)
        case InvalidInput():
            status, code = 400, "invalid_value"
        case RequestValidationError():
            first = error.errors()[0]
            param = ".".join(str(part) for part in first["loc"][1:])[:80] or None
            status, code, message = 400, "invalid_value", f"{param}: {first['msg']}"
        case HTTPException():
            status, code, message = error.status_code, None, str(error.detail)
            headers |= dict(error.headers or {})
        case _:
            message = "the service failed; its log says why"
            log.error("failed", exc_info=error)
    body = error_body(status, message, code=code, param=param)
    return Response(body.model_dump_json(), status, headers, "application/json")


def _of_this_api(message: str) -> tuple[str, str | None]:
    """Return a message of `wan_tpu.request` with the API's name of the field that it begins with, and that name."""
    field, _, rest = message.partition(" ")
    param = _FIELDS.get(field)
    return (message, None) if param is None else (f"{param if field in _RENAMED else field} {rest}", param)


def install(app: FastAPI) -> None:
    """Have the errors that are raised on purpose answered so; `Guard` sees to all others."""

    async def handle(_: Request, error: Exception) -> Response:
        return answer(error)

    for kind in (Problem, UnknownKey, TooMany, JobError, InvalidInput, NotReady, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)
