"""What fails is tried again after each pause, for as long as that may help."""

import asyncio
import itertools

import pytest

from actors.retrying import back_off, retry


def try_until(succeeds_at, pauses_s, *, gives_up_at=99):
    """Return what `retry` returns of work whose attempt with that number succeeds, and the pauses that it noted."""
    attempts, noted = itertools.count(1), []

    async def work():
        if (attempt := next(attempts)) < succeeds_at:
            raise ConnectionError(attempt)
        return attempt

    async def note(error, pause_s):
        noted.append(pause_s)
        if error.args[0] == gives_up_at:
            raise error

    return asyncio.run(retry(work, (OSError,), pauses_s, note)), noted


def test_work_is_repeated_until_it_succeeds():
    assert try_until(3, itertools.repeat(0.0)) == (3, [0.0, 0.0])


def test_the_last_error_passes_through():
    with pytest.raises(ConnectionError) as last:
        try_until(4, (0.0, 0.0))
    assert last.value.args == (3,)


def test_an_error_for_which_repeating_is_of_no_use_passes_through():
    with pytest.raises(ConnectionError) as first:
        try_until(3, itertools.repeat(0.0), gives_up_at=1)
    assert first.value.args == (1,)


def test_pauses_grow_up_to_the_longest():
    assert list(itertools.islice(back_off(10.0), 7)) == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
