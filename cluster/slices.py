"""A slice as its leader has it: one worker on every TPU host, all joined, called in lockstep.

`Slice` has its hosts on a Ray cluster, `LocalSlice` is the same in this process. Lose one host, and the whole gang is
destroyed: build a new one.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Protocol, Self

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.errors import CallFailed, SliceLost, SliceStartTimeout
from cluster.gang import HostPlace, Output, Timeouts, report, this_host
from cluster.host_actor import HostActor
from cluster.local_slice import LocalSlice
from cluster.placement import Placement, reserve
from cluster.slice_spec import SliceSpec
from cluster.watch import GangFailed, Member, OutOfTime, Watch, agree

__all__ = ["Gang", "HostPlace", "LocalSlice", "Output", "Slice", "Timeouts", "report", "this_host"]

OnProgress = Callable[[Any], None]


class Gang(Protocol):
    """What a leader needs of a slice, wherever it runs.

    A call runs the worker's method with the same arguments on every host; rank 0's value is the result. References to
    payloads among the arguments are resolved on the hosts. Calls block, and come one after the other in each of the
    two lanes: `call` in lockstep, `side` next to it, for methods that hold no collective.

    Raises of all calls: `CallFailed` when every host raised (the slice lives), `SliceLost` when the gang is destroyed.
    """

    name: str

    @property
    def emulated(self) -> bool:
        """Whether CPU devices stand for the chips."""

    def describe(self) -> str:
        """Return name, kind and hosts in one line, which says so if the slice is emulated."""

    def call(
        self, method: str, *args: Any, timeout_s: float | None = None, on_progress: OnProgress | None = None
    ) -> Any:
        """Return rank 0's value. `on_progress` gets what the method reports, perhaps not all of it."""

    def call_payload(
        self, method: str, *args: Any, timeout_s: float | None = None, on_progress: OnProgress | None = None
    ) -> tuple[Any, Any]:
        """Return rank 0's value and a reference to the payload of its `Output`, which doesn't pass through here."""

    def side(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Do as `call`, beside the calls."""

    def side_payload(self, method: str, *args: Any, timeout_s: float | None = None) -> tuple[Any, Any]:
        """Do as `call_payload`, beside the calls."""

    def check(self) -> None:
        """Return if all hosts answer; raise `SliceLost` if not."""

    def close(self) -> None:
        """End all hosts and give the slice back. Never fails; a second time does nothing."""


class Slice:
    """A gang on a Ray cluster. The leader is the process that makes it: when that dies, so does the gang.

    A leader that is an actor must be detached, as Serve's replicas are: Ray keeps the placement group of any other
    actor until its whole job ends.
    """

    def __init__(
        self,
        spec: SliceSpec,
        worker_class: type | str,
        *args: Any,
        name: str = "slice",
        timeouts: Timeouts = Timeouts(),  # noqa: B008 (frozen)
        on_progress: OnProgress | None = None,
    ) -> None:
        """Reserve a free slice, start its hosts, join them, and build `worker_class(*args)` on each.

        worker_class  or "module:name", which is imported on the hosts alone and keeps the leader small
        name  who holds the slice, "pool/replica", shown by `wan-tpu cluster status`

        Raises `SliceStartTimeout` naming phase and missing host, `SliceLost` when a host dies meanwhile, `CallFailed`
        when the worker can't be built. Nothing is left behind then.
        """
        self.spec = spec
        self.name = name
        self.timeouts = timeouts
        self._locks = {"calls": threading.Lock(), "side": threading.Lock()}
        self._state = threading.Lock()
        self._lost: SliceLost | None = None
        self._placement: Placement | None = None
        self._members: tuple[Member, ...] = ()
        try:
            self._placement = reserve(spec, name, timeouts.place_s)
            self._start_hosts(self._placement)
            if spec.hosts > 1:
                self._join()
            self._run_phase("build", timeouts.build_s, "build", worker_class, *args, on_progress=on_progress)
        except BaseException:
            self.close()
            raise

    @property
    def hosts(self) -> tuple[HostPlace, ...]:
        """Where its hosts run, by rank."""
        return tuple(member.place for member in self._members)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of its hosts, by rank."""
        return tuple(member.pid for member in self._members)

    @property
    def emulated(self) -> bool:
        """Whether CPU devices stand for the chips."""
        return any(host.emulated for host in self.hosts)

    def describe(self) -> str:
        """Return name, kind and hosts in one line, which says so if the slice is emulated."""
        hosts = ", ".join(f"{host.node_id[:8]} at {host.ip}" for host in self.hosts)
        return f"{self.name} on {'emulated ' if self.emulated else ''}{self.spec} ({hosts})"

    def call(
        self, method: str, *args: Any, timeout_s: float | None = None, on_progress: OnProgress | None = None
    ) -> Any:
        """Return rank 0's value of a method run in lockstep on all hosts: see `Gang`."""
        return self._run("calls", "call", method, *args, timeout_s=timeout_s, on_progress=on_progress)[0]

    def call_payload(
        self, method: str, *args: Any, timeout_s: float | None = None, on_progress: OnProgress | None = None
    ) -> tuple[Any, ray.ObjectRef]:
        """Return rank 0's value and a reference to its payload: see `Gang`. The payload outlives the slice."""
        return self._run("calls", "call", method, *args, timeout_s=timeout_s, on_progress=on_progress)

    def side(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Do as `call`, beside the calls."""
        return self._run("side", "side", method, *args, timeout_s=timeout_s)[0]

    def side_payload(self, method: str, *args: Any, timeout_s: float | None = None) -> tuple[Any, ray.ObjectRef]:
        """Do as `call_payload`, beside the calls."""
        return self._run("side", "side", method, *args, timeout_s=timeout_s)

    def check(self) -> None:
        """Return if all hosts answer within `heartbeat_s`; else destroy the gang and raise `SliceLost`."""
        self._raise_if_lost()
        refs = [member.actor.hello.options(num_returns=2).remote()[0] for member in self._members]
        try:
            Watch(self._members, refs, self.timeouts, lane=None, timeout_s=self.timeouts.heartbeat_s).wait()
        except GangFailed as failure:
            raise self._lose(str(failure), failure.member) from failure.cause
        except OutOfTime as late:
            raise self._lose(f"{late} for {self.timeouts.heartbeat_s:g} s", late.missing[0]) from None

    def close(self) -> None:
        """End all hosts, also stopped ones, and give the slice back. Ray ends the processes within a second."""
        self._lose(f"{self.name} is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_hosts(self, placement: Placement) -> None:
        actors: list[Any] = []
        for place in placement.hosts:
            strategy = PlacementGroupSchedulingStrategy(placement.group, place.rank)
            settings: dict[str, Any] = {
                "num_cpus": 0,
                "resources": {"TPU": self.spec.chips_per_host},
                "concurrency_groups": {"calls": 1, "side": 1, "watch": 1},
                "scheduling_strategy": strategy,
            }
            actors.append(ray.remote(**settings)(HostActor).remote(place))
        self._members = tuple(Member(place, actor) for place, actor in zip(placement.hosts, actors, strict=True))
        hellos = self._run_phase("start", self.timeouts.start_s, "hello", lane=None)
        self._members = tuple(
            dataclasses.replace(member, pid=hello[0]) for member, hello in zip(self._members, hellos, strict=True)
        )
        self._port = hellos[0][1]

    def _join(self) -> None:
        coordinator = f"{self._members[0].place.ip}:{self._port}"
        self._run_phase("join", self.timeouts.join_s, "join", coordinator, self.timeouts.join_s)

    def _run_phase(
        self,
        phase: str,
        timeout_s: float,
        method: str,
        *args: Any,
        lane: str | None = "calls",
        on_progress: OnProgress | None = None,
    ) -> list[Any]:
        """Run one phase of the start on all hosts; return their values by rank."""
        refs = [getattr(member.actor, method).options(num_returns=2).remote(*args)[0] for member in self._members]
        watch = Watch(self._members, refs, self.timeouts, lane=lane, timeout_s=timeout_s, on_progress=on_progress)
        try:
            outcomes = watch.wait()
            error = agree(self._members, outcomes)
        except OutOfTime as late:
            raise SliceStartTimeout(f"{self.name}: {phase} took longer than {timeout_s:g} s; {late}") from None
        except GangFailed as failure:
            raise self._lose(f"in {phase}: {failure}", failure.member) from failure.cause
        if error is not None:
            raise CallFailed(f"{self.name}: {phase} failed on every host: {error!r}") from error
        return [outcome.value for outcome in outcomes]

    def _run(
        self,
        lane: str,
        kind: str,
        method: str,
        *args: Any,
        timeout_s: float | None,
        on_progress: OnProgress | None = None,
    ) -> tuple[Any, ray.ObjectRef]:
        with self._locks[lane]:
            self._raise_if_lost()
            pairs = [getattr(m.actor, kind).options(num_returns=2).remote(method, *args) for m in self._members]
            outcomes = [outcome for outcome, _ in pairs]
            watch = Watch(
                self._members, outcomes, self.timeouts, lane=lane, timeout_s=timeout_s, on_progress=on_progress
            )
            try:
                ended = watch.wait()
                error = agree(self._members, ended)
            except OutOfTime as late:
                raise self._lose(f"{method} took longer than {timeout_s:g} s; {late}", late.missing[0]) from None
            except GangFailed as failure:
                raise self._lose(f"in {method}: {failure}", failure.member) from failure.cause
            except BaseException:  # Ctrl-C, or on_progress raised: the hosts are left in the middle of something
                self._lose(f"{self.name} was lost: nobody waited for the end of {method}")
                raise
        if error is not None:
            raise CallFailed(f"{self.name}: {method} raised on every host: {error!r}") from error
        return ended[0].value, pairs[0][1]

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise SliceLost(str(self._lost), self._lost.rank, self._lost.node_id)

    def _lose(self, why: str, member: Member | None = None) -> SliceLost:
        """Destroy the gang, once; return the error that was the first reason."""
        with self._state:
            if self._lost is None:
                place = member and member.place
                self._lost = SliceLost(
                    why if place is None else f"{self.name}: {why}",
                    place.rank if place else None,
                    place.node_id if place else None,
                )
                self._destroy()
            return self._lost

    def _destroy(self) -> None:
        for member in self._members:
            with contextlib.suppress(Exception):
                ray.kill(member.actor)
        if self._placement is not None:
            with contextlib.suppress(Exception):
                self._placement.release()
