"""What a leader and the hosts of its slice say to each other, and what a worker may use of it."""

import contextvars
import importlib
import os
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timeouts:
    """How long each phase may take before it has failed, seconds.

    place_s      until a free slice with all its hosts is found
    start_s      until every host's process answers
    join_s       until jax.distributed has joined them
    build_s      until every host has built its worker (reads weights, may compile)
    heartbeat_s  without an answer a host counts as hung; it answers while it computes
    grace_s      for the other hosts to raise too when one has; for a killed process to be gone
    poll_s       between heartbeats, and so between two looks at the progress
    """

    place_s: float = 60
    start_s: float = 60
    join_s: float = 120
    build_s: float = 1800
    heartbeat_s: float = 20
    grace_s: float = 10
    poll_s: float = 0.25


@dataclass(frozen=True)
class Output:
    """What a worker's method returns to hand out something large.

    value    small; it goes to the leader
    payload  stays in the object store; the leader and whoever it is passed to have a reference only
    """

    value: Any
    payload: Any


@dataclass(frozen=True)
class HostPlace:
    """Where one process of a slice runs.

    rank     0 to hosts - 1: the TPU worker id
    devices  CPU devices that stand for this host's chips when it is emulated, None on a TPU
    """

    rank: int
    hosts: int
    slice_name: str
    node_id: str
    ip: str
    devices: int | None = None

    @property
    def emulated(self) -> bool:
        """Whether CPU devices stand for the chips."""
        return self.devices is not None

    def __str__(self) -> str:
        return f"host {self.rank} of {self.hosts} ({self.slice_name}, node {self.node_id[:8]} at {self.ip})"


@dataclass(frozen=True)
class Pulse:
    """A host's answer to a heartbeat: how long it has been busy (None: idle), and its latest report, numbered."""

    busy_s: float | None
    reports: int
    progress: Any


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one host: a value (rank 0's only), or what was raised; and its last report."""

    value: Any = None
    error: Exception | None = None
    reports: int = 0
    progress: Any = None


class Lane:
    """One of the two things that a host does at a time: calls in lockstep, or the side work next to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None
        self._reports = 0
        self._progress: Any = None
        self._listener: Callable[[Any], None] | None = None

    def run(
        self, work: Callable[[], Any], listener: Callable[[Any], None] | None = None, *, keep: bool = True
    ) -> tuple[Outcome, Any]:
        """Run `work`; return how it ended and its payload. Its reports go to `listener` as they come.

        keep  whether the result is wanted (rank 0's is)
        """
        with self._lock:
            self._since, self._reports, self._progress = time.monotonic(), 0, None
        self._listener = listener
        token = _lane.set(self)
        try:
            result = work()
        except Exception as error:
            return self._end(None, _portable(error)), None
        finally:
            _lane.reset(token)
            self._since = None
        if not keep:
            return self._end(None, None), None
        if isinstance(result, Output):
            return self._end(result.value, None), result.payload
        return self._end(result, None), None

    def report(self, value: Any) -> None:
        """Remember the latest progress."""
        with self._lock:
            self._reports += 1
            self._progress = value
        if self._listener is not None:
            self._listener(value)

    def pulse(self) -> Pulse:
        """Return what the lane is doing."""
        with self._lock:
            since = self._since
            return Pulse(None if since is None else time.monotonic() - since, self._reports, self._progress)

    def _end(self, value: Any, error: Exception | None) -> Outcome:
        return Outcome(value, error, self._reports, self._progress)


_lane: contextvars.ContextVar[Lane | None] = contextvars.ContextVar("lane", default=None)
_place: HostPlace | None = None


def report(value: Any) -> None:
    """Tell the leader how far the running call is: a small picklable value. The leader may see only the latest."""
    lane = _lane.get()
    if lane is not None:
        lane.report(value)


def this_host() -> HostPlace:
    """Return where the worker that asks runs."""
    return _place or HostPlace(0, 1, "this process", f"pid {os.getpid()}", socket.gethostname())


def set_this_host(place: HostPlace) -> None:
    """Say where this process runs: once, before the worker is built."""
    global _place
    _place = place


def found_class(worker_class: type | str) -> type:
    """Return a worker's class; one that was given as "module:name" is imported here, on the host."""
    if isinstance(worker_class, type):
        return worker_class
    module, _, name = worker_class.partition(":")
    return getattr(importlib.import_module(module), name)


class RemoteError(Exception):
    """Stands for an exception that can't be sent from its host; the message has its type and text."""


def _portable(error: Exception) -> Exception:
    """Return the exception with its traceback as a note, or a `RemoteError` if it doesn't survive pickling."""
    text = "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is not type(error):
            raise TypeError
    except Exception:  # whatever its __reduce__ or __init__ raise
        copy = RemoteError(f"{type(error).__name__}: {error}")
    copy.add_note(f"on the host:\n{text}")
    return copy
