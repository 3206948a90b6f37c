"""Messages between a leader and the hosts of its slice, and progress reports of code on a host."""

import contextvars
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

# The lanes of calls. Calls in `lockstep` have collectives, so all hosts run them in the same order. The others run
# in parallel, each in its own lane, so that a slow download or a copy onto the devices delays no state to be saved.
Lane = Literal["lockstep", "side", "save", "network", "stream"]
LANES: tuple[Lane, ...] = get_args(Lane)


@dataclass(frozen=True)
class Timeouts:
    """Time-outs of a slice, in seconds."""

    place_s: float | None = None  # Until a slice is free with all its hosts; None to wait for ever.
    start_s: float = 60  # Until every host's process answers.
    join_s: float = 120  # Until jax.distributed has joined the hosts.
    # Until every host has built its object, for which it reads weights and may compile, or has reported progress; then
    # until the next report.
    build_s: float = 1800
    heartbeat_s: float = 20  # A host that doesn't answer for this long counts as hung. Hosts answer while they compute.
    grace_s: float = 10  # For the other hosts to raise after one has raised, and for a killed process to end.
    # The shortest time after which a gang can count as hung in a call whose kind took far less before. Hosts that wait
    # for each other in a collective would answer heartbeats for ever.
    hung_s: float = 60
    poll_s: float = 0.25  # Between two heartbeats, and so between two updates of the progress.
    # Until another process has released a host's chips. The slice is started again and again meanwhile.
    chips_s: float = 2100


@dataclass(frozen=True)
class Output:
    """The result of a host's method, part of which is large."""

    value: Any  # The small part, which goes to the leader.
    # The large part, which stays in the object store; the leader gets only a reference, and may pass it on.
    payload: Any


@dataclass(frozen=True)
class HostPlace:
    """The place of one process of a slice."""

    # 0 to hosts - 1, from the node's label. Hosts find each other by it. It need not be JAX's process index, which
    # depends on where the host is in the slice's network.
    worker_id: int
    hosts: int
    slice_name: str
    node_id: str
    ip: str
    devices: int | None = None  # How many CPU devices stand in for an emulated host's chips; None on a TPU.
    chips: int = 0  # How many devices JAX counts on a TPU host.

    @property
    def emulated(self) -> bool:
        """Whether CPU devices stand in for the chips."""
        return self.devices is not None

    def __str__(self) -> str:
        return f"host {self.worker_id} of {self.hosts} ({self.slice_name}, node {self.node_id[:8]} at {self.ip})"


@dataclass(frozen=True)
class Pulse:
    """A host's answer to a heartbeat."""

    busy_s: float | None  # How long its call has been running; None if it is idle.
    reports: int  # How many times the call has reported progress.
    progress: Any
    # What the host does or waits for while it joins the others, as a predicate such as "imports JAX".
    joining: str = ""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call on one host."""

    value: Any = None  # What it returned; None except on the first process, unless the caller asked for all.
    error: Exception | None = None  # What it raised, or None.
    reports: int = 0
    progress: Any = None


class LaneRunner:
    """Runs the calls of one lane, one at a time, and reports the progress of the running call meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None
        self._reports = 0
        self._progress: Any = None

    def run(self, function: Callable[..., Any], *args: Any, keep: bool = True) -> tuple[Outcome, Any]:
        """Run a function.

        Args:
            keep: Whether to keep the result; usually only the first process's is wanted.

        Returns:
            How it ended, and its payload.
        """
        with self._lock:
            self._since, self._reports, self._progress = time.monotonic(), 0, None
        token = _runner.set(self)
        output, raised = Output(None, None), None
        try:
            result = function(*args)
            if keep:
                output = result if isinstance(result, Output) else Output(result, None)
        except Exception as error:
            raised = _make_portable(error)
        finally:
            _runner.reset(token)
            self._since = None
        return Outcome(output.value, raised, self._reports, self._progress), output.payload

    def report(self, value: Any) -> None:
        with self._lock:
            self._reports += 1
            self._progress = value

    def pulse(self) -> Pulse:
        """Return how long the running call has taken, and its latest report."""
        with self._lock:
            since = self._since
            return Pulse(None if since is None else time.monotonic() - since, self._reports, self._progress)


_runner: contextvars.ContextVar[LaneRunner | None] = contextvars.ContextVar("runner", default=None)


def report(value: Any) -> None:
    """Report the progress of the running call to the leader.

    Args:
        value: Anything small that can be pickled. The leader may see only the latest one. An attribute `within_s`
            allows more time until the next report; see `cluster.gang.watch.Watch`.
    """
    runner = _runner.get()
    if runner is not None:
        runner.report(value)


class DeviceError(Exception):
    """A device, its runtime or an exchange between devices failed; the message is JAX's."""


class RemoteError(Exception):
    """Stands in for an exception that can't be sent from its host; the message has its type and text."""


def _make_portable(error: Exception) -> Exception:
    """Return an exception with its traceback as a note, or a `RemoteError` if it doesn't survive pickling."""
    text = "".join(traceback.format_exception(error))
    jax = sys.modules.get("jax")  # A process that hasn't imported JAX runs nothing on devices.
    if jax is not None and isinstance(error, jax.errors.JaxRuntimeError):
        error = DeviceError(str(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is not type(error):
            raise TypeError
    except Exception:  # Its __reduce__ or __init__ may raise anything.
        copy = RemoteError(f"{type(error).__name__}: {error}")
    copy.add_note(f"on the host:\n{text}")
    return copy
