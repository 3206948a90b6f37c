"""Follow one call on all hosts of a gang until every outcome is in, or the gang must be given up.

One host's end ends others: JAX ends every process once worker 0's is gone, where all are joined, and an exchange with a
host that is gone fails on those that are left. Who is named doesn't depend on whose end is noticed first.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from cluster.gang.devices import speaks_of_others
from cluster.gang.protocol import Group, HostPlace, Outcome, Pulse, Timeouts


@dataclass(frozen=True)
class Member:
    """One host as its leader sees it. `pid` is 0 until it has answered."""

    place: HostPlace
    actor: ActorHandle
    pid: int = 0

    def __str__(self) -> str:
        return str(self.place) if not self.pid else f"{str(self.place)[:-1]}, pid {self.pid})"


class GangFailed(Exception):
    """The gang is out of step: who was first to blame, what happened, and the exception behind it, if any."""

    def __init__(self, member: Member, event: str, cause: Exception | None = None) -> None:
        super().__init__(f"{member} {event}")
        self.cause = cause


class OutOfTime(Exception):
    """Time is up; the message says who has not answered, and what those do that are joining the others."""


def culprit(errors: Mapping[int, Exception]) -> int:
    """Return whose error is the cause of all: the first that doesn't speak of another host."""
    return next((index for index, error in errors.items() if not speaks_of_others(error)), next(iter(errors)))


class Watch:
    """One call on all members. `wait` blocks; it polls every `poll_s` and answers at once when all are done."""

    def __init__(
        self,
        members: Sequence[Member],
        outcomes: Sequence[ray.ObjectRef],
        timeouts: Timeouts,
        *,
        group: Group | None,
        timeout_s: float | None = None,
        on_progress: Callable[[Any], None] | None = None,
    ) -> None:
        """Prepare to follow.

        outcomes   of type Outcome, one for each member
        group      whose heartbeats are watched; None when the hosts can't answer any yet
        timeout_s  that may pass until the end, or until the first member reports something, and from then on: a report
                   that has an attribute `within_s`, not None, asks for so long in place of it until the next
        """
        now = time.monotonic()
        self._members = members
        self._pending = dict(zip(outcomes, range(len(members)), strict=True))
        self._timeouts = timeouts
        self._group = group
        self._symmetric = group in ("lockstep", None)  # nobody waits for another host beside the lockstep
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else now + timeout_s
        self._on_progress = on_progress
        self._outcomes: dict[int, Outcome] = {}
        self._errors: dict[int, Exception] = {}  # Of members, in the order in which they came.
        self._failed_at = 0.0  # When the first of them came.
        self._dead: dict[int, RayActorError] = {}
        self._died_at = 0.0  # When the first of them was noticed.
        self._first = next(index for index, member in enumerate(members) if member.place.worker_id == 0)
        self._pulses: dict[int, tuple[ray.ObjectRef, float]] = {}  # And when they were asked for.
        self._seen = dict.fromkeys(range(len(members)), now)
        self._alive = dict.fromkeys(range(len(members)), 0.0)  # When the last one that was answered was asked for.
        self._joining: dict[int, str] = {}
        self._reports = 0

    def wait(self) -> list[Outcome]:
        """Return the outcomes in the order of the members: of calls in lockstep all have failed, or none has.

        Raises `GangFailed` or, after `timeout_s`, `OutOfTime`.
        """
        while self._pending or self._dead:
            self._collect()
            if self._pending or self._dead:
                if self._group is not None:
                    self._check_pulses(self._group)
                self._check_dead()
                self._check_grace()
                if self._pending and self._deadline is not None and time.monotonic() > self._deadline:
                    missing = "; ".join(self._describe(index) for index in sorted(self._pending.values()))
                    raise OutOfTime(f"no answer from {missing}")
        ended = [self._outcomes[index] for index in range(len(self._members))]
        if self._symmetric and self._errors and any(outcome.error is None for outcome in ended):
            index = culprit(self._errors)
            error = self._errors[index]
            raise GangFailed(self._members[index], f"raised {_named(error)}, other hosts did not", error)
        self._report(ended[0].reports, ended[0].progress)
        return ended

    def _collect(self) -> None:
        """Take the outcomes that are in, after at most `poll_s`."""
        if not self._pending:
            time.sleep(self._timeouts.poll_s)
            return
        ready, _ = ray.wait(
            list(self._pending), num_returns=len(self._pending), timeout=self._timeouts.poll_s, fetch_local=False
        )
        for ref in ready:
            index = self._pending.pop(ref)
            try:
                outcome = ray.get(ref)
            except RayActorError as error:
                self._note_death(index, error)
                continue
            except RayError as error:  # an argument that couldn't be fetched: the method didn't run
                outcome = Outcome(error=error)
            self._outcomes[index] = outcome
            if outcome.error is not None:
                self._failed_at = self._failed_at or time.monotonic()
                self._errors[index] = outcome.error

    def _check_dead(self) -> None:
        """Raise for a host that died: for worker 0 where that is dead, too, and for another once worker 0 has answered.

        Where worker 0 was killed, JAX has ended the others, and their end may be noticed first. If it doesn't answer,
        as when its machine is gone, it is found to be hung in time.
        """
        joined = self._group is not None and len(self._members) > 1
        if not self._dead or (joined and self._first not in self._dead and self._alive[self._first] <= self._died_at):
            return
        index = self._first if self._first in self._dead else min(self._dead)
        error = self._dead[index]
        raise GangFailed(self._members[index], f"died ({telling_line(error)})", error)

    def _check_grace(self) -> None:
        """Raise for a host that raised while others went on.

        An error that speaks of others waits for those that are silent since: one of them is dead or hung, as will be
        known in time.
        """
        if not self._symmetric or not self._errors or time.monotonic() - self._failed_at < self._timeouts.grace_s:
            return
        index = culprit(self._errors)
        error = self._errors[index]
        silent = [other for other in self._pending.values() if self._alive[other] <= self._failed_at]
        if not (silent and self._group is not None and speaks_of_others(error)):
            raise GangFailed(self._members[index], f"raised {_named(error)} while others went on", error)

    def _check_pulses(self, group: Group) -> None:
        refs = [ref for ref, _ in self._pulses.values()]
        answered = ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []
        now = time.monotonic()
        for index in sorted(self._pulses, key=lambda index: index != self._first):
            ref, asked = self._pulses[index]
            if ref in answered:
                del self._pulses[index]
                try:
                    pulse: Pulse = ray.get(ref)
                except RayActorError as error:
                    self._note_death(index, error)
                    continue
                # Idle: the call has ended, or hasn't begun and what is there is of the one before.
                if index == 0 and pulse.busy_s is not None:
                    self._report(pulse.reports, pulse.progress)
                self._joining[index] = pulse.joining
                self._seen[index], self._alive[index] = now, asked
            elif now - self._seen[index] > self._timeouts.heartbeat_s:
                raise GangFailed(self._members[index], f"is hung: no heartbeat for {self._timeouts.heartbeat_s:g} s")
        for index, member in enumerate(self._members):
            if index not in self._pulses and index not in self._dead:
                self._pulses[index] = member.actor.pulse.remote(group), now

    def _note_death(self, index: int, error: RayActorError) -> None:
        self._died_at = self._died_at or time.monotonic()
        self._dead.setdefault(index, error)

    def _describe(self, index: int) -> str:
        joining = self._joining.get(index)
        return f"{self._members[index]}{f', which {joining}' if joining else ''}"

    def _report(self, reports: int, progress: Any) -> None:
        if reports <= self._reports:
            return
        self._reports = reports
        if self._timeout_s is not None:
            within_s = getattr(progress, "within_s", None)
            self._deadline = time.monotonic() + (self._timeout_s if within_s is None else within_s)
        if self._on_progress is not None:
            self._on_progress(progress)


def _named(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def telling_line(error: BaseException) -> str:
    """Return the telling line of Ray's long message, for people."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    telling = next((line for line in lines if "exit" in line.lower() or "dead" in line.lower()), first)
    return telling.partition(" Some common causes")[0]  # which Ray lists at length, the same every time
