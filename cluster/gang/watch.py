"""Follow one call on all hosts of a gang until every outcome is in, or the gang must be given up."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

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

    def __init__(self, member: Member, what: str, cause: Exception | None = None) -> None:
        super().__init__(f"{member} {what}")
        self.cause = cause


class OutOfTime(Exception):
    """Time is up; the message says who has not answered."""


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
        self._first_error: tuple[float, int, Exception] | None = None  # when, by whom, what
        self._pulses: dict[int, ray.ObjectRef] = {}
        self._seen = dict.fromkeys(range(len(members)), now)
        self._reports = 0

    def wait(self) -> list[Outcome]:
        """Return the outcomes in the order of the members: of calls in lockstep all have failed, or none has.

        Raises `GangFailed` or, after `timeout_s`, `OutOfTime`.
        """
        while self._pending:
            ready, _ = ray.wait(
                list(self._pending), num_returns=len(self._pending), timeout=self._timeouts.poll_s, fetch_local=False
            )
            for ref in ready:
                self._collect(ref)
            if self._pending:
                self._check_grace()
                if self._group is not None:
                    self._check_pulses(self._group)
                if self._deadline is not None and time.monotonic() > self._deadline:
                    missing = "; ".join(str(self._members[index]) for index in sorted(self._pending.values()))
                    raise OutOfTime(f"no answer from {missing}")
        ended = [self._outcomes[index] for index in range(len(self._members))]
        if self._symmetric and self._first_error is not None and any(outcome.error is None for outcome in ended):
            _, index, error = self._first_error
            raise GangFailed(self._members[index], f"raised {_named(error)}, other hosts did not", error)
        self._report(ended[0].reports, ended[0].progress)
        return ended

    def _collect(self, ref: ray.ObjectRef) -> None:
        index = self._pending.pop(ref)
        try:
            outcome = self._answer(ref, index)
        except RayError as error:  # an argument that couldn't be fetched: the method didn't run
            outcome = Outcome(error=error)
        self._outcomes[index] = outcome
        if outcome.error is not None and self._first_error is None:
            self._first_error = time.monotonic(), index, outcome.error

    def _check_grace(self) -> None:
        if self._symmetric and self._first_error is not None:
            since, index, error = self._first_error
            if time.monotonic() - since >= self._timeouts.grace_s:
                raise GangFailed(self._members[index], f"raised {_named(error)} while others went on", error)

    def _check_pulses(self, group: Group) -> None:
        refs = list(self._pulses.values())
        answered = ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []
        now = time.monotonic()
        for index, ref in list(self._pulses.items()):
            if ref in answered:
                del self._pulses[index]
                pulse: Pulse = self._answer(ref, index)
                # Idle: the call has ended, or hasn't begun and what is there is of the one before.
                if index == 0 and pulse.busy_s is not None:
                    self._report(pulse.reports, pulse.progress)
                self._seen[index] = now
            elif now - self._seen[index] > self._timeouts.heartbeat_s:
                raise GangFailed(self._members[index], f"is hung: no heartbeat for {self._timeouts.heartbeat_s:g} s")
        for index, member in enumerate(self._members):
            if index not in self._pulses:
                self._pulses[index] = member.actor.pulse.remote(group)

    def _answer(self, ref: ray.ObjectRef, index: int) -> Any:
        try:
            return ray.get(ref)
        except RayActorError as error:
            raise GangFailed(self._members[index], f"died ({telling_line(error)})", error) from None

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
