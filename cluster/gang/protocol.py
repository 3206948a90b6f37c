"""What a leader and the hosts of its slice say to each other, and what runs on a host may use of it."""

import contextvars
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

# Of calls: those with collectives, which all hosts make in the same order; and three that may run beside them, each
# with a lane of its own, so that a slow download or a copy onto the devices delays no state that is to be saved.
Group = Literal["lockstep", "side", "save", "network"]
GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(frozen=True)
class Timeouts:
    """How long each phase may take before it has failed, seconds.

    place_s      until a free slice with all its hosts is found; None: without end
    start_s      until every host's process answers
    join_s       until jax.distributed has joined them
    build_s      until every host has built its object (reads weights, may compile), or reports how far it is, and then
                 until the next report
    heartbeat_s  without an answer a host counts as hung; it answers while it computes
    grace_s      for the other hosts to raise too when one has; for a killed process to be gone
    hung_s       at least, of a call whose like has taken a small part of that, before the gang counts as hung: hosts
                 that wait for each other in a collective answer heartbeats for ever
    poll_s       between heartbeats, and so between two looks at the progress
    chips_s      until another process has let go of a host's chips; the slice is started again and again meanwhile
    """

    place_s: float | None = None
    start_s: float = 60
    join_s: float = 120
    build_s: float = 1800
    heartbeat_s: float = 20
    grace_s: float = 10
    hung_s: float = 60
    poll_s: float = 0.25
    chips_s: float = 2100


@dataclass(frozen=True)
class Output:
    """What a host's method returns to hand out something large.

    value    small; it goes to the leader
    payload  stays in the object store; the leader and whoever it is passed to have a reference only
    """

    value: Any
    payload: Any


@dataclass(frozen=True)
class HostPlace:
    """Where one process of a slice runs.

    worker_id  0 to hosts - 1, from the node's label. Hosts find each other by it. It need not be JAX's process index,
               which follows from where the host lies in the slice's network
    devices  CPU devices that stand for this host's chips when it is emulated, None on a TPU
    chips    devices that JAX counts on a TPU host
    """

    worker_id: int
    hosts: int
    slice_name: str
    node_id: str
    ip: str
    devices: int | None = None
    chips: int = 0

    @property
    def emulated(self) -> bool:
        """Whether CPU devices stand for the chips."""
        return self.devices is not None

    def __str__(self) -> str:
        return f"host {self.worker_id} of {self.hosts} ({self.slice_name}, node {self.node_id[:8]} at {self.ip})"


@dataclass(frozen=True)
class Pulse:
    """A host's answer to a heartbeat: how long it has been busy (None: idle), and its latest report, numbered.

    joining  while it joins the others: what it does or waits for, for people, as a host's predicate
    """

    busy_s: float | None
    reports: int
    progress: Any
    joining: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one host: a value (the first process's only), or what was raised; and its last report."""

    value: Any = None
    error: Exception | None = None
    reports: int = 0
    progress: Any = None


class GroupRunner:
    """Runs the calls of one group, one at a time, and answers meanwhile how far the running one is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None
        self._reports = 0
        self._progress: Any = None

    def run(self, function: Callable[..., Any], *args: Any, keep: bool = True) -> tuple[Outcome, Any]:
        """Run a function; return how it ended and its payload.

        keep  whether the result is wanted (the first process's is)
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
            raised = _portable(error)
        finally:
            _runner.reset(token)
            self._since = None
        return Outcome(output.value, raised, self._reports, self._progress), output.payload

    def report(self, value: Any) -> None:
        """Remember the latest progress."""
        with self._lock:
            self._reports += 1
            self._progress = value

    def pulse(self) -> Pulse:
        """Return what is running."""
        with self._lock:
            since = self._since
            return Pulse(None if since is None else time.monotonic() - since, self._reports, self._progress)


_runner: contextvars.ContextVar[GroupRunner | None] = contextvars.ContextVar("runner", default=None)


def report(value: Any) -> None:
    """Tell the leader how far the running call is: a small picklable value. The leader may see only the latest.

    It may have an attribute `within_s`, see `cluster.gang.watch.Watch`.
    """
    runner = _runner.get()
    if runner is not None:
        runner.report(value)


class DeviceError(Exception):
    """A device, its runtime or an exchange between devices failed; the message is what JAX said."""


class RemoteError(Exception):
    """Stands for an exception that can't be sent from its host; the message has its type and text."""


def _portable(error: Exception) -> Exception:
    """Return the exception with its traceback as a note, or a `RemoteError` if it doesn't survive pickling."""
    text = "".join(traceback.format_exception(error))
    jax = sys.modules.get("jax")  # who hasn't imported it runs nothing on devices
    if jax is not None and isinstance(error, jax.errors.JaxRuntimeError):
        error = DeviceError(str(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is not type(error):
            raise TypeError
    except Exception:  # whatever its __reduce__ or __init__ raise
        copy = RemoteError(f"{type(error).__name__}: {error}")
    copy.add_note(f"on the host:\n{text}")
    return copy
