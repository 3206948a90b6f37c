"""Follow one call on all hosts of a gang until every outcome is in, or the gang must be given up.

When one host ends, others end as well: all JAX processes join at worker 0 and end when it is gone, and an exchange with
a lost host fails on the others. The error names the host to blame, whichever end is noticed first.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from cluster.gang.devices import speaks_of_others
from cluster.gang.protocol import HostPlace, Lane, Outcome, Pulse, Timeouts


@dataclass(frozen=True)
class Member:
    """One host as its leader sees it; `pid` is 0 until it has answered."""

    place: HostPlace
    actor: ActorHandle
    pid: int = 0

    def __str__(self) -> str:
        return str(self.place) if not self.pid else f"{str(self.place)[:-1]}, pid {self.pid})"


class GangFailed(Exception):
    """The gang is out of step; the message says which host is to blame and what happened to it."""

    def __init__(self, member: Member, event: str, cause: Exception | None = None) -> None:
        super().__init__(f"{member} {event}")
        self.cause = cause


class OutOfTime(Exception):
    """Time is up. The message names the hosts that haven't answered, and says how far joining hosts have got."""


def find_culprit(errors: Mapping[int, Exception]) -> int:
    """Return the index of the member whose error caused all others: the first that doesn't blame another host."""
    return next((index for index, error in errors.items() if not speaks_of_others(error)), next(iter(errors)))


class Watch:
    """One call on all members. `wait` blocks: it polls every `poll_s`, and returns at once when all have ended."""

    def __init__(
        self,
        members: Sequence[Member],
        outcomes: Sequence[ray.ObjectRef],
        timeouts: Timeouts,
        *,
        lane: Lane | None,
        timeout_s: float | None = None,
        on_progress: Callable[[Any], None] | None = None,
    ) -> None:
        """Prepare to follow a call.

        Args:
            outcomes: A reference to each member's `Outcome`.
            timeouts: For heartbeats and polls.
            lane: The lane whose heartbeats are watched; None while the hosts can't answer any yet.
            timeout_s: How long the call may take until its end or the first member's next report. A report with an
                attribute `within_s` that isn't None allows that long until the next one instead.
            on_progress: Called with the first member's reports; some may be skipped.
        """
        now = time.monotonic()
        self._members = members
        self._pending = dict(zip(outcomes, range(len(members)), strict=True))
        self._timeouts = timeouts
        self._lane = lane
        self._symmetric = lane in ("lockstep", None)  # Outside the lockstep, no host waits for another.
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else now + timeout_s
        self._on_progress = on_progress
        self._outcomes: dict[int, Outcome] = {}
        self._errors: dict[int, Exception] = {}  # By member, in the order in which they came.
        self._failed_at = 0.0  # When the first error came.
        self._dead: dict[int, RayActorError] = {}
        self._died_at = 0.0  # When the first death was noticed.
        self._first = next(index for index, member in enumerate(members) if member.place.worker_id == 0)
        self._pulses: dict[int, tuple[ray.ObjectRef, float]] = {}  # Open heartbeats, and when they were requested.
        self._seen = dict.fromkeys(range(len(members)), now)
        self._alive = dict.fromkeys(range(len(members)), 0.0)  # When the last answered heartbeat was requested.
        self._joining: dict[int, str] = {}
        self._reports = 0

    def wait(self) -> list[Outcome]:
        """Wait until the call has ended on all members.

        Returns:
            The outcomes, in the order of the members. In lockstep, all of them are errors, or none is.

        Raises:
            GangFailed: A host died or hung, or left the lockstep.
            OutOfTime: The time-out is over.
        """
        while self._pending or self._dead:
            self._collect()
            if self._pending or self._dead:
                if self._lane is not None:
                    self._check_pulses(self._lane)
                self._check_dead()
                self._check_grace()
                if self._pending and self._deadline is not None and time.monotonic() > self._deadline:
                    missing = "; ".join(self._describe(index) for index in sorted(self._pending.values()))
                    raise OutOfTime(f"no answer from {missing}")
        ended = [self._outcomes[index] for index in range(len(self._members))]
        if self._symmetric and self._errors and any(outcome.error is None for outcome in ended):
            index = find_culprit(self._errors)
            error = self._errors[index]
            raise GangFailed(self._members[index], f"raised {_format_error(error)}, but the other hosts did not", error)
        self._report(ended[0].reports, ended[0].progress)
        return ended

    def _collect(self) -> None:
        """Collect outcomes, for which this waits for `poll_s` at most."""
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
            except RayError as error:  # An argument couldn't be fetched, so the method didn't run.
                outcome = Outcome(error=error)
            self._outcomes[index] = outcome
            if outcome.error is not None:
                self._failed_at = self._failed_at or time.monotonic()
                self._errors[index] = outcome.error

    def _check_dead(self) -> None:
        """Raise `GangFailed` for a host that died. If worker 0 is dead too, blame it; otherwise wait for its answer.

        When worker 0 is killed, JAX ends the others, and their end may be noticed first. If worker 0 doesn't answer,
        for instance because its machine is gone, its missing heartbeats will show that in time.
        """
        joined = self._lane is not None and len(self._members) > 1
        if not self._dead or (joined and self._first not in self._dead and self._alive[self._first] <= self._died_at):
            return
        index = self._first if self._first in self._dead else min(self._dead)
        error = self._dead[index]
        raise GangFailed(self._members[index], f"died ({pick_telling_line(error)})", error)

    def _check_grace(self) -> None:
        """Raise `GangFailed` for a host that raised while others went on.

        If its error blames another host, wait for hosts that have been silent since: one of them is dead or hung, which
        will be noticed in time.
        """
        if not self._symmetric or not self._errors or time.monotonic() - self._failed_at < self._timeouts.grace_s:
            return
        index = find_culprit(self._errors)
        error = self._errors[index]
        silent = [other for other in self._pending.values() if self._alive[other] <= self._failed_at]
        if not (silent and self._lane is not None and speaks_of_others(error)):
            raise GangFailed(
                self._members[index], f"raised {_format_error(error)} while the other hosts continued", error
            )

    def _check_pulses(self, lane: Lane) -> None:
        refs = [ref for ref, _ in self._pulses.values()]
        ready = ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []
        now = time.monotonic()
        for index in sorted(self._pulses, key=lambda index: index != self._first):
            ref, asked_at = self._pulses[index]
            if ref in ready:
                del self._pulses[index]
                try:
                    pulse: Pulse = ray.get(ref)
                except RayActorError as error:
                    self._note_death(index, error)
                    continue
                # If a host is idle, its call has ended or hasn't begun, and its report may be from the previous call.
                if index == 0 and pulse.busy_s is not None:
                    self._report(pulse.reports, pulse.progress)
                self._joining[index] = pulse.joining
                self._seen[index], self._alive[index] = now, asked_at
            elif now - self._seen[index] > self._timeouts.heartbeat_s:
                raise GangFailed(self._members[index], f"is hung: no heartbeat for {self._timeouts.heartbeat_s:g} s")
        for index, member in enumerate(self._members):
            if index not in self._pulses and index not in self._dead:
                self._pulses[index] = member.actor.pulse.remote(lane), now

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


def _format_error(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def pick_telling_line(error: BaseException) -> str:
    """Return the line of Ray's long message that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    telling = next((line for line in lines if "exit" in line.lower() or "dead" in line.lower()), first)
    # Ray appends a long list of common causes, which is always the same.
    return telling.partition(" Some common causes")[0]
