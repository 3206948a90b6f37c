"""What Ray and Serve raise when slices, replicas and objects are lost, as this package's errors."""

import contextlib
from collections.abc import Iterator

from ray.exceptions import ObjectLostError, RayActorError, RayError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

from actors.errors import InputLost, PipelineError, RequestFailed, StageLost
from cluster.gang.watch import telling_line

# Also that more calls wait than may: other drivers use the same pools, and whoever waits may find them free.
_LOST = (
    RayActorError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    TaskCancelledError,
    BackPressureError,
)


@contextlib.contextmanager
def losses_explained() -> Iterator[None]:
    """Raise what a stage raised without Ray's wrapping, Ray's own errors as `StageLost`, `InputLost` or failures."""
    try:
        yield
    except _LOST as error:
        raise StageLost(telling_line(error)) from None
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, PipelineError):
            raise cause from None
        if isinstance(error, ObjectLostError) or isinstance(cause, RayError):
            raise InputLost(telling_line(cause or error)) from None
        raise RequestFailed(f"{type(cause or error).__name__}: {telling_line(cause or error)}", "error") from error
