"""A slice as its leader uses it: one process on every TPU host, all of them joined and called in lockstep.

When one host is lost, the whole gang is destroyed, and a new one must be built.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import ray
from ray.util import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.errors import CallFailed, ChipsBusy, DeviceFailed, SliceError, SliceLost, SliceStartTimeout, WrongHost
from cluster.gang.host_actor import HostActor
from cluster.gang.machine_place import check_machine_places
from cluster.gang.placement import OnStatus, Placement, reserve
from cluster.gang.protocol import LANES, DeviceError, HostPlace, Lane, Outcome, Timeouts
from cluster.gang.watch import GangFailed, Member, OutOfTime, Watch, find_culprit, pick_telling_line
from cluster.slice_spec import SliceSpec

OnProgress = Callable[[Any], None]

BUSY_PAUSE_S = 10.0  # Pause before another try when another process holds a host's chips.


def take(
    spec: SliceSpec,
    host_class: type | str,
    *args: Any,
    timeouts: Timeouts = Timeouts(),  # noqa: B008 (frozen)
    on_status: OnStatus = lambda text: None,
    **keywords: Any,
) -> "Slice":
    """Build a `Slice`, retrying while another process holds the chips of one of its hosts.

    Arguments and errors are those of `Slice`. An error has the cause `ChipsBusy` only after `timeouts.chips_s`.
    """
    until = time.monotonic() + timeouts.chips_s
    while True:
        try:
            return Slice(spec, host_class, *args, timeouts=timeouts, on_status=on_status, **keywords)
        except (CallFailed, SliceLost) as error:
            left_s = until - time.monotonic()
            if not isinstance(error.__cause__, ChipsBusy) or left_s < BUSY_PAUSE_S:
                raise
            on_status(f"{error.__cause__}; tried again in {BUSY_PAUSE_S:g} s, for {left_s:.0f} s more at most")
        time.sleep(BUSY_PAUSE_S)


class Returned(NamedTuple):
    """The result of a call: the first process's value, and a reference to the payload of its `Output`."""

    value: Any
    payload: ray.ObjectRef


class Slice:
    """A gang on a Ray cluster. Its leader is the process that builds it; the gang dies with its leader.

    If the leader is an actor, it must be detached, as Serve's replicas are: Ray keeps any other actor's placement group
    until its whole job ends.
    """

    def __init__(
        self,
        spec: SliceSpec,
        host_class: type | str,
        *args: Any,
        name: str = "slice",
        timeouts: Timeouts = Timeouts(),  # noqa: B008 (frozen)
        on_progress: OnProgress | None = None,
        on_status: OnStatus = lambda text: None,
    ) -> None:
        """Reserve a free slice, start its hosts, join them, and build `host_class(*args)` on each.

        If this fails, nothing is left behind. `SliceLost` and `CallFailed` have the cause `ChipsBusy` if JAX didn't get
        the chips.

        Args:
            host_class: The class, or "module:name", which only the hosts import, so that the leader stays small. If it
                has a method `software`, which returns by name what it computes with, hosts that differ are refused.
            name: Who holds the slice, "pool/replica", as `wan-tpu status` shows it.
            timeouts: How long each phase may take.
            on_progress: Called with the reports of the first host while its object is built.
            on_status: Called with what is being waited for while no slice is free.

        Raises:
            SliceStartTimeout: A phase took too long; the message names the phase and the missing host.
            SliceLost: A host died.
            CallFailed: The class couldn't be built.
            WrongHost: A machine's place in its slice isn't what its labels say.
            SliceError: The hosts aren't alike.
        """
        self.spec = spec
        self.name = name
        self.timeouts = timeouts
        self._locks = {lane: threading.Lock() for lane in LANES}
        self._state = threading.Lock()
        self._lost: SliceLost | None = None
        self._placement: Placement | None = None
        self._members: tuple[Member, ...] = ()
        self.start_s: dict[str, float] = {}  # How many seconds each phase of the start took.
        try:
            with self._time_phase("placed"):
                self._placement = reserve(spec, name, timeouts.place_s, on_status)
            with self._time_phase("started"):
                port = self._start_hosts(self._placement)
            if spec.hosts > 1:
                with self._time_phase("joined"):
                    self._join(f"{self.hosts[0].ip}:{port}")
            with self._time_phase("built"):
                built = self._run_phase("build", timeouts.build_s, "build", host_class, *args, on_progress=on_progress)
            self.software: dict[str, str] = self._check_alike([outcome.value for outcome in built])
        except BaseException:
            self.close()
            raise

    @property
    def hosts(self) -> tuple[HostPlace, ...]:
        """Where the hosts run, in the order of JAX's processes."""
        return tuple(member.place for member in self._members)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the hosts, in the same order."""
        return tuple(member.pid for member in self._members)

    @property
    def emulated(self) -> bool:
        """Whether CPU devices stand in for the chips."""
        return any(host.emulated for host in self.hosts)

    def describe(self) -> str:
        """Return name, kind and hosts in one line, which also says whether the slice is emulated."""
        hosts = ", ".join(f"{host.node_id[:8]} at {host.ip}" for host in self.hosts)
        return f"{self.name} on {'emulated ' if self.emulated else ''}{self.spec} ({hosts})"

    def call(
        self,
        method: str,
        *args: Any,
        lane: Lane = "lockstep",
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Returned:
        """Run a method of `host_class` with the same arguments on every host, and block until all have ended.

        Args:
            *args: Its arguments. References to objects in the store are resolved on the hosts.
            lane: The lane of the call. Calls of one lane run one after the other. All lanes but "lockstep" are for
                methods without collectives, which may run in parallel with the lockstep.
            timeout_s: After this time without an end or a report, the call counts as hung.
            on_progress: Called with the reports of the method on the first host; some may be skipped.

        Raises:
            CallFailed: Every host raised, or one of them outside the lockstep. The slice lives on.
            SliceLost: The gang was destroyed.
            DeviceFailed: A device failed, or waits for another one for ever, so the devices' contents can't be trusted.
                The gang was destroyed.
        """
        outcomes, payloads = self._call_all(method, args, lane, timeout_s=timeout_s, on_progress=on_progress)
        return Returned(outcomes[0].value, payloads[0])

    def gather(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Run a method as `call` does in lockstep, and return each host's result, in the order of `hosts`."""
        outcomes, _ = self._call_all(method, args, "lockstep", keep=True, timeout_s=timeout_s)
        return [outcome.value for outcome in outcomes]

    def _call_all(
        self,
        method: str,
        args: Sequence[Any],
        lane: Lane,
        *,
        keep: bool = False,
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> tuple[list[Outcome], list[ray.ObjectRef]]:
        """Run a method on all hosts; return outcomes and payloads, of the first host only unless `keep`."""
        with self._locks[lane]:
            self._raise_if_lost()
            calls: list[Any] = [m.actor.call.options(concurrency_group=lane, num_returns=2) for m in self._members]
            pairs: list[Any] = [call.remote(lane, keep, method, *args) for call in calls]
            try:
                outcomes = self._wait(
                    method, [pair[0] for pair in pairs], lane=lane, timeout_s=timeout_s, on_progress=on_progress
                )
            except SliceError:
                raise
            except OutOfTime as late:
                raise self._lose(f"{self.name}: {method} has hung: {late} in {timeout_s:g} s", DeviceFailed) from None
            except BaseException:  # After Ctrl-C, or if on_progress raised, the hosts are in the middle of something.
                self._lose(f"{self.name} was lost: nobody waited for the end of {method}")
                raise
        return outcomes, [pair[1] for pair in pairs]

    def check(self) -> None:
        """Check that all hosts answer within `heartbeat_s`; otherwise destroy the gang and raise `SliceLost`."""
        self._raise_if_lost()
        limit_s = self.timeouts.heartbeat_s
        refs = [member.actor.hello.options(num_returns=2).remote()[0] for member in self._members]
        try:
            self._wait("check", refs, lane="side", timeout_s=limit_s)
        except OutOfTime as late:
            raise self._lose(f"{self.name}: {late} for {limit_s:g} s") from None

    def close(self) -> None:
        """Kill all hosts, even suspended ones, and release the slice. Ray ends the processes within a second."""
        self._lose(f"{self.name} is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _time_phase(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.start_s[phase] = time.monotonic() - start

    def _start_hosts(self, placement: Placement) -> int:
        """Start a process on each host, and return a port that is free on the first."""
        for place, bundle in zip(placement.hosts, placement.bundles, strict=True):
            settings: dict[str, Any] = {
                "num_cpus": 0,
                "resources": {"TPU": self.spec.chips_per_host},
                "concurrency_groups": dict.fromkeys((*LANES, "watch"), 1),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(placement.group, bundle),
            }
            actor: Any = ray.remote(**settings)(HostActor).remote(place)
            self._members += (Member(place, actor),)
        hellos = [outcome.value for outcome in self._run_phase("start", self.timeouts.start_s, "hello", lane=None)]
        self._members = tuple(
            dataclasses.replace(member, pid=pid) for member, (pid, _) in zip(self._members, hellos, strict=True)
        )
        return hellos[0][1]

    def _join(self, coordinator: str) -> None:
        """Join the hosts' JAX processes, and put the members into JAX's order."""
        machines = self._run_phase("start", self.timeouts.start_s, "machine_place", lane=None)
        check_machine_places(self.hosts, [outcome.value for outcome in machines])
        joined = self._run_phase("join", self.timeouts.join_s, "join", coordinator, self.timeouts.join_s)
        by_process = {outcome.value: member for outcome, member in zip(joined, self._members, strict=True)}
        if sorted(by_process) != list(range(self.spec.hosts)):
            counts = ", ".join(f"{m} is {o.value}" for o, m in zip(joined, self._members, strict=True))
            raise WrongHost(
                f"{self.name}: JAX counts two of its hosts as the same process: {counts}; unset CLOUD_TPU_TASK_ID, "
                "TPU_PROCESS_BOUNDS and TPU_PROCESS_ADDRESSES there, which override the machine's own place"
            )
        self._members = tuple(by_process[process] for process in range(self.spec.hosts))

    def _check_alike(self, software: Sequence[dict[str, str]]) -> dict[str, str]:
        """Return the software that all hosts use; raise `SliceError` if it differs, which makes results unreliable."""
        for process, other in enumerate(software[1:], 1):
            if different := sorted(name for name in software[0] if software[0][name] != other.get(name)):
                name = different[0]
                raise SliceError(
                    f"{self.name}: its hosts differ in software: {name} is {software[0][name]!r} on "
                    f"{self._members[0]}, and "
                    f"{other.get(name)!r} on {self._members[process]}; give them the same software and flags"
                )
        return software[0]

    def _run_phase(
        self,
        phase: str,
        timeout_s: float,
        method: str,
        *args: Any,
        lane: Lane | None = "lockstep",
        on_progress: OnProgress | None = None,
    ) -> list[Outcome]:
        """Run one phase of the start on all hosts."""
        refs = [getattr(member.actor, method).options(num_returns=2).remote(*args)[0] for member in self._members]
        try:
            return self._wait(phase, refs, lane=lane, timeout_s=timeout_s, on_progress=on_progress)
        except OutOfTime as late:
            raise SliceStartTimeout(
                f"{self.name}: {phase} took longer than {timeout_s:g} s; {late}; --timeout {phase}=SECONDS allows more"
            ) from None

    def _wait(self, method: str, refs: Sequence[ray.ObjectRef], **watched: Any) -> list[Outcome]:
        """Wait for one call on all hosts, as `Watch` does.

        Raises:
            CallFailed: The hosts raised; the slice lives on.
            SliceLost: The gang was destroyed.
            OutOfTime: The time-out is over.
        """
        try:
            outcomes = Watch(self._members, refs, self.timeouts, **watched).wait()
        except GangFailed as failure:
            raise self._lose(f"{self.name}: in {method}: {failure}") from failure.cause
        errors = {index: outcome.error for index, outcome in enumerate(outcomes) if outcome.error is not None}
        if errors:
            index = find_culprit(errors)
            member, error = self._members[index], errors[index]
            if any(isinstance(other, DeviceError) for other in errors.values()):
                raise self._lose(
                    f"{self.name}: in {method}: {member}: {pick_telling_line(error)}", DeviceFailed
                ) from error
            where = "every host" if len(errors) == len(outcomes) else str(member)
            raise CallFailed(f"{self.name}: {method} raised on {where}: {error!r}") from error
        return outcomes

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise SliceLost(str(self._lost))

    def _lose(self, why: str, kind: type[SliceLost] = SliceLost) -> SliceLost:
        """Destroy the gang unless that has happened; return the error for which it was first destroyed."""
        with self._state:
            if self._lost is None:
                self._lost = kind(why)
                self._destroy()
            return self._lost

    def _destroy(self) -> None:
        for member in self._members:
            with contextlib.suppress(Exception):
                ray.kill(member.actor)
        if self._placement is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(self._placement.group)
