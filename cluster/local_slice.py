"""A slice in this process, without Ray."""

import threading
from collections.abc import Callable
from typing import Any, Self

from cluster.errors import CallFailed, SliceLost
from cluster.gang import Lane, Timeouts, found_class
from cluster.slice_spec import SliceSpec


class LocalSlice:
    """The protocol `cluster.slices.Gang` in this process: a payload's reference is the payload itself.

    It has whatever devices JAX finds here, so it is of a kind only if its maker says so, and never called emulated.
    """

    emulated = False

    def __init__(
        self,
        spec: SliceSpec | None,
        worker_class: type | str,
        *args: Any,
        name: str = "slice",
        timeouts: Timeouts = Timeouts(),  # noqa: B008 (frozen)
        on_progress: Callable[[Any], None] | None = None,
    ) -> None:
        """Build `worker_class(*args)`. Raises `CallFailed` when that raises. Timeouts mean nothing here."""
        self.spec = spec
        self.name = name
        self.timeouts = timeouts
        self._lanes = {"calls": Lane(), "side": Lane()}
        self._locks = {"calls": threading.Lock(), "side": threading.Lock()}
        self._closed = False
        self._worker: Any = None

        def build() -> None:
            self._worker = found_class(worker_class)(*args)

        self._run("calls", "build", build, on_progress)

    def describe(self) -> str:
        """Return name and kind in one line."""
        return f"{self.name} in this process" + (f", as {self.spec}" if self.spec else "")

    def call(
        self,
        method: str,
        *args: Any,
        timeout_s: float | None = None,
        on_progress: Callable[[Any], None] | None = None,
    ) -> Any:
        """Return the value of a method of the worker. Raises `CallFailed` with its exception as the cause."""
        return self.call_payload(method, *args, on_progress=on_progress)[0]

    def call_payload(
        self,
        method: str,
        *args: Any,
        timeout_s: float | None = None,
        on_progress: Callable[[Any], None] | None = None,
    ) -> tuple[Any, Any]:
        """Return value and payload of a method's `Output`."""
        return self._run("calls", method, lambda: getattr(self._worker, method)(*args), on_progress)

    def side(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Do as `call`, also while a call runs in another thread."""
        return self.side_payload(method, *args)[0]

    def side_payload(self, method: str, *args: Any, timeout_s: float | None = None) -> tuple[Any, Any]:
        """Do as `call_payload`, also while a call runs in another thread."""
        return self._run("side", method, lambda: getattr(self._worker, method)(*args))

    def check(self) -> None:
        """Raise `SliceLost` if it is closed."""
        if self._closed:
            raise SliceLost(f"{self.name} is closed")

    def close(self) -> None:
        """Let go of the worker."""
        self._closed = True
        self._worker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        lane: str,
        what: str,
        work: Callable[[], Any],
        on_progress: Callable[[Any], None] | None = None,
    ) -> tuple[Any, Any]:
        self.check()
        with self._locks[lane]:
            outcome, payload = self._lanes[lane].run(work, on_progress)
        if outcome.error is not None:
            raise CallFailed(f"{self.name}: {what} raised {outcome.error!r}") from outcome.error
        return outcome.value, payload
