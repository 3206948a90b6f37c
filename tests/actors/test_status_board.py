"""A status board keeps what is renewed and forgets the rest; a report takes as long however many came before."""

import dataclasses
import pickle
import time

import pytest

from actors.observe import status_board
from actors.observe.meters import PipelineMeters
from actors.observe.status_board import (
    EXPIRY_S,
    FAILED_EXPIRY_S,
    MAX_FAILED,
    MAX_LISTED,
    UNNAMED_EXPIRY_S,
    ReplicaStatus,
    StatusBoard,
)


@pytest.fixture
def now():
    """The time of the board's clock, in a list."""
    return [1000.0]


@pytest.fixture
def board(now):
    return StatusBoard(PipelineMeters(), clock=lambda: now[0])


def replica(activity="idle", pool="experts", **more):
    return ReplicaStatus(pool, "slice-a", activity, "", (), 5.0, **more)


def test_replica_that_is_renewed_stays_and_keeps_its_time(board, now):
    board.report_replica("experts/a", replica())
    for _ in range(10):
        now[0] += EXPIRY_S - 1
        board.report_replica("experts/a", dataclasses.replace(replica(), since=99.0))
    assert board.read().replicas == {"experts/a": replica()}


@pytest.mark.parametrize(
    ("activity", "expiry_s"),
    [("idle", EXPIRY_S), ("draining", EXPIRY_S), ("loading", EXPIRY_S), ("refused", FAILED_EXPIRY_S)],
)
def test_replica_of_a_killed_process_is_forgotten(activity, expiry_s, board, now):
    board.report_replica("experts/a", replica(activity))
    now[0] += expiry_s
    assert list(board.read().replicas) == ["experts/a"]
    now[0] += 0.1
    assert board.read().replicas == {}
    board.refresh()


def test_requests_of_a_killed_driver_are_forgotten(board, now):
    board.report_request("cat", "waiting", 0, 0, None)
    board.report_request("dog", "decoder", 0, 0, None)
    board.report_requests("driver-1", ["cat", "dog"])
    now[0] += EXPIRY_S - 1
    board.report_requests("driver-1", ["cat", "dog"])
    now[0] += 1
    board.report_request("dog", "decoder", 0, 0, None)
    now[0] += EXPIRY_S - 1
    stages = {key: request.stage for key, request in board.read().requests.items()}
    assert stages == {"cat": "waiting", "dog": "decoder"}
    now[0] += 0.5
    assert list(board.read().requests) == ["dog"]
    now[0] += 0.6
    assert board.read().requests == {}


def test_request_that_no_driver_renews_may_wait_for_an_hour(board, now):
    board.report_request("cat", "waiting", 0, 0, None)
    now[0] += UNNAMED_EXPIRY_S
    assert list(board.read().requests) == ["cat"]
    now[0] += 0.1
    assert not board.read().requests


def test_driver_renews_its_own_requests_only(board, now):
    board.report_requests("driver-1", ["cat", "dog"])
    board.report_requests("driver-2", ["owl"])
    board.report_requests("driver-1", ["dog"])  # The end of "cat" was never heard of.
    assert set(board.read().requests) == {"dog", "owl"}
    now[0] += EXPIRY_S - 1
    board.report_requests("driver-2", ["owl"])
    now[0] += 2
    assert set(board.read().requests) == {"owl"}


def test_board_that_was_restarted_learns_of_requests_from_their_driver(board):
    board.report_requests("driver-1", ["cat"])
    assert board.read().requests["cat"].stage == "waiting"
    board.report_request("cat", "denoise_high", 3, 8, 0.5)
    board.report_requests("driver-1", ["cat"])
    assert board.read().requests["cat"].step == 3


def test_reason_for_a_slice_stays_until_the_request_leaves_it(board):
    board.report_request("cat", "denoise", 0, 8, None)
    board.report_request("cat", "denoise", 0, 8, None, "experts/a", "0 calls, others 2")
    board.report_request("cat", "denoise", 1, 8, 0.5, "experts/a")
    cat = board.read().requests["cat"]
    assert (cat.slice, cat.chosen, cat.step) == ("experts/a", "0 calls, others 2", 1)
    board.report_request("cat", "denoise", 2, 8, 0.5, "experts/b")  # Its first span got lost.
    assert (cat.slice, cat.chosen) == ("experts/b", "")
    board.report_request("cat", "decoder", 0, 8, None)
    assert (cat.slice, cat.chosen) == ("", "")


def test_pool_that_never_starts_leaves_its_latest_failures_only(board):
    for number in range(3 * MAX_FAILED):
        board.report_replica(f"experts/{number}", replica("failed"))
    assert list(board.read().replicas) == [f"experts/{i}" for i in range(2 * MAX_FAILED, 3 * MAX_FAILED)]


def test_list_for_readers_is_bounded(board):
    board.report_requests("driver-1", [f"cat-{i}" for i in range(MAX_LISTED + 500)])
    board.report_request("late", "decoder", 0, 0, None)
    seen = board.read()
    assert len(seen.requests) == MAX_LISTED and "late" in seen.requests
    assert seen.unlisted == {"waiting": 501}


def test_software_of_a_thousand_replicas_is_sent_once(board):
    software = {"jax": "0.12", "flags": "x" * 1000}
    for number in range(1000):
        board.report_replica(f"experts/{number}", replica(software=dict(software)))
    assert len(pickle.dumps(board.read())) < 200_000


def test_report_takes_as_long_with_a_thousand_replicas_as_with_one(now):
    def seconds(replicas):
        board = StatusBoard(PipelineMeters(), clock=lambda: now[0])
        for number in range(replicas):
            board.report_replica(f"experts/{number}", replica())
        reports = [(f"experts/{i % replicas}", replica(("idle", "busy")[i % 2])) for i in range(2000)]
        start = time.process_time()
        for name, seen in reports:
            board.report_replica(name, seen)
        return time.process_time() - start

    assert seconds(3000) < 20 * seconds(3)  # 1,000 times as many cost 1,000 times as much before


def test_figures_follow_what_is_known(board, now, monkeypatch):
    counts_shown = []
    monkeypatch.setattr(status_board.PipelineMeters, "show", lambda self, *counts: counts_shown.append(counts))
    board.report_replica("experts/a", replica("busy"))
    board.report_requests("driver-1", ["cat", "dog"])
    board.refresh()
    now[0] += EXPIRY_S + 1
    board.refresh()
    assert counts_shown == [({("experts", "busy"): 1}, {"waiting": 2}), ({}, {})]
