"""Translates errors of Ray and Serve about lost slices, replicas and objects into this package's errors."""

import contextlib
from collections.abc import Iterator

from ray.exceptions import ObjectLostError, RayActorError, RayError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

from actors.errors import InputLost, PipelineError, RequestFailed, StageInterrupted
from cluster.gang.watch import pick_telling_line

# `BackPressureError` is included because the pools may be busy with other drivers' requests, and free again later.
_INTERRUPTIONS = (
    RayActorError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    TaskCancelledError,
    BackPressureError,
)


@contextlib.contextmanager
def explain_losses() -> Iterator[None]:
    """Unwrap a stage's error, and turn Ray's own errors into `StageInterrupted`, `InputLost` or `RequestFailed`."""
    try:
        yield
    except _INTERRUPTIONS as error:
        raise StageInterrupted(pick_telling_line(error)) from None
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, PipelineError):
            raise cause from None
        if isinstance(error, ObjectLostError) or isinstance(cause, RayError):
            raise InputLost(pick_telling_line(cause or error)) from None
        raise RequestFailed(f"{type(cause or error).__name__}: {pick_telling_line(cause or error)}", "error") from error
