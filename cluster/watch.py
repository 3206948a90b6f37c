"""Follow one call on all hosts of a gang until every outcome is in, or the gang must be given up."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from cluster.gang import HostPlace, Outcome, Pulse, Timeouts


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
        self.member = member
        self.cause = cause


class OutOfTime(Exception):
    """Time is up; these have not answered."""

    def __init__(self, missing: Sequence[Member]) -> None:
        super().__init__(f"no answer from {'; '.join(map(str, missing))}")
        self.missing = tuple(missing)


class Watch:
    """One call on all members. `wait` blocks; it polls every `poll_s` and answers at once when all are done."""

    def __init__(
        self,
        members: Sequence[Member],
        outcomes: Sequence[ray.ObjectRef],
        timeouts: Timeouts,
        *,
        lane: str | None,
        timeout_s: float | None = None,
        on_progress: Callable[[Any], None] | None = None,
    ) -> None:
        """Prepare to follow.

        outcomes  of type Outcome, one for each member
        lane      whose heartbeats are watched; None when the hosts can't answer any yet
        """
        now = time.monotonic()
        self._members = members
        self._pending = dict(zip(outcomes, range(len(members)), strict=True))
        self._timeouts = timeouts
        self._lane = lane
        self._deadline = None if timeout_s is None else now + timeout_s
        self._on_progress = on_progress
        self._outcomes: dict[int, Outcome] = {}
        self._first_error_at: float | None = None
        self._pulses: dict[int, ray.ObjectRef] = {}
        self._seen = dict.fromkeys(range(len(members)), now)
        self._reports = 0

    def wait(self) -> list[Outcome]:
        """Return the outcomes by rank. Raises `GangFailed` or, after `timeout_s`, `OutOfTime`."""
        while self._pending:
            ready, _ = ray.wait(
                list(self._pending), num_returns=len(self._pending), timeout=self._timeouts.poll_s, fetch_local=False
            )
            for ref in ready:
                self._collect(ref)
            if self._pending:
                self._check_grace()
                if self._lane is not None:
                    self._check_pulses(self._lane)
                if self._deadline is not None and time.monotonic() > self._deadline:
                    raise OutOfTime([self._members[rank] for rank in sorted(self._pending.values())])
        ended = [self._outcomes[rank] for rank in range(len(self._members))]
        self._tell(ended[0].reports, ended[0].progress)
        return ended

    def _collect(self, ref: ray.ObjectRef) -> None:
        rank = self._pending.pop(ref)
        try:
            outcome = ray.get(ref)
        except RayActorError as error:
            raise GangFailed(self._members[rank], f"died ({_reason(error)})", error) from None
        except RayError as error:  # an argument that couldn't be fetched: the method didn't run
            outcome = Outcome(error=error)
        self._outcomes[rank] = outcome
        if outcome.error is not None and self._first_error_at is None:
            self._first_error_at = time.monotonic()

    def _check_grace(self) -> None:
        if self._first_error_at is None or time.monotonic() - self._first_error_at < self._timeouts.grace_s:
            return
        rank = next(rank for rank, outcome in self._outcomes.items() if outcome.error is not None)
        raised = self._outcomes[rank].error
        assert raised is not None
        raise GangFailed(self._members[rank], f"raised {_named(raised)} while others went on", raised)

    def _check_pulses(self, lane: str) -> None:
        refs = list(self._pulses.values())
        answered = ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []
        now = time.monotonic()
        for rank, ref in list(self._pulses.items()):
            if ref in answered:
                del self._pulses[rank]
                self._hear(rank, self._answer(ref, rank))
                self._seen[rank] = now
            elif now - self._seen[rank] > self._timeouts.heartbeat_s:
                raise GangFailed(self._members[rank], f"is hung: no heartbeat for {self._timeouts.heartbeat_s:g} s")
        for rank, member in enumerate(self._members):
            if rank not in self._pulses:
                self._pulses[rank] = member.actor.pulse.remote(lane)

    def _answer(self, ref: ray.ObjectRef, rank: int) -> Pulse:
        try:
            return ray.get(ref)
        except RayActorError as error:
            raise GangFailed(self._members[rank], f"died ({_reason(error)})", error) from None

    def _hear(self, rank: int, pulse: Pulse) -> None:
        # Idle: the call has ended, or hasn't begun and what is there is of the one before.
        if rank == 0 and pulse.busy_s is not None:
            self._tell(pulse.reports, pulse.progress)

    def _tell(self, reports: int, progress: Any) -> None:
        if reports > self._reports and self._on_progress is not None:
            self._reports = reports
            self._on_progress(progress)


def agree(members: Sequence[Member], outcomes: Sequence[Outcome]) -> Exception | None:
    """Return rank 0's exception if all raised, None if none did. Raises `GangFailed` when they disagree."""
    errors = [outcome.error for outcome in outcomes]
    raised = [rank for rank, error in enumerate(errors) if error is not None]
    if raised and len(raised) < len(errors):
        first = errors[raised[0]]
        assert first is not None
        raise GangFailed(members[raised[0]], f"raised {_named(first)}, other hosts did not", first)
    return errors[0]


def _named(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _reason(error: RayActorError) -> str:
    """Return the telling line of Ray's long message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    telling = next((line for line in lines if "exit" in line.lower() or "dead" in line.lower()), first)
    return telling.partition(" Some common causes")[0]  # which Ray lists at length, the same every time
