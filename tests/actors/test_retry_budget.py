"""How long a request that fails waits before it is tried again, and when it is given up."""

import itertools

import pytest

from actors.errors import RequestFailed, StageFailed, StageInterrupted
from actors.pipeline.retry_budget import LONGEST_WAIT_S, RetryBudget
from actors.reliability import ReliabilitySettings
from tests.actors.simulation.virtual_time import virtual_time


def fail_until_it_is_given_up(error, attempts, progress_after=None):
    """Return the seconds of each wait, and the outcome of the failure."""
    waits = []

    async def run():
        budget = RetryBudget("cat", ReliabilitySettings(stage_attempts=attempts))
        for count in itertools.count(1):
            before = loop.time()
            await budget.wait_after(error)
            waits.append(loop.time() - before)
            if count == progress_after:
                budget.note_progress("denoise", 1)

    with virtual_time() as loop, pytest.raises(RequestFailed) as failed:
        loop.run_until_complete(run())
    return waits, failed.value.code


def test_waits_double_until_the_request_is_given_up():
    waits, _ = fail_until_it_is_given_up(StageInterrupted("gone"), 8)
    assert waits == [1, 2, 4, 8, LONGEST_WAIT_S, LONGEST_WAIT_S, LONGEST_WAIT_S]


def test_progress_begins_anew():
    waits, _ = fail_until_it_is_given_up(StageInterrupted("gone"), 4, progress_after=2)
    assert waits == [1, 2, 1, 2, 4]


def test_what_fails_everywhere_is_to_blame():
    outcomes = [fail_until_it_is_given_up(error("no"), 3)[1] for error in (StageInterrupted, StageFailed)]
    assert outcomes == ["lost", "error"]
