"""Rates: what a bucket admits at once, after a while, and after it was overdrawn."""

import time

import pytest

from actors.api.token_buckets import TokenBuckets


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that stands still; its first item is the time."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_bucket_admits_its_burst_and_then_its_rate(clock):
    buckets = TokenBuckets(burst_s=10.0)
    assert [buckets.take("ann", 5.0)[0] for _ in range(3)] == [0.0, 0.0, 5.0]
    assert buckets.take("bob", 5.0) == (0.0, 5.0)
    clock[0] += 4.0
    assert buckets.take("ann", 5.0) == (1.0, 6.0)
    clock[0] += 1.0
    assert buckets.take("ann", 5.0) == (0.0, 10.0)


def test_what_is_taken_in_any_case_says_how_long_it_is_owed(clock):
    buckets = TokenBuckets(burst_s=2.0)
    assert [buckets.overdraw("ann", 1.5) for _ in range(2)] == [0.0, 1.0]
    clock[0] += 100.0
    assert buckets.overdraw("ann", 3.0) == 1.0


def test_full_buckets_are_forgotten_and_others_are_not(clock):
    buckets = TokenBuckets(burst_s=10.0)
    buckets.take("slow", 3600.0)
    for number in range(3000):
        clock[0] += 1.0
        buckets.take(str(number), 1.0)
    assert buckets.take("slow", 3600.0)[0] == 600.0
    assert len(buckets._full_at) < 1100
