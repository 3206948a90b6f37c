"""The distributed half under a virtual clock: real leaders, schedulers, snapshots and drivers, with faults everywhere.

A failing seed prints what happened; `python -m tests.actors.simulation SEED` runs it again.
"""

import os
import time

import pytest

from actors.errors import RequestFailed
from actors.pipeline.request_run import RequestRun
from actors.slices.async_slice import AsyncSlice
from actors.slices.leader import SliceLeader
from tests.actors.simulation.scenario import limit_garbage_collection, simulate
from wan_tpu.errors import OutputError
from wan_tpu.stage_machine import StageMachine

VIDEOS = 1500
# The first seeds have uncovered defects: storage that is down at the end, a drain that begins late, a full disk on the
# only slice, a hung call whose driver was killed, a cancelled request that is submitted again.
SEEDS = (127, 435, 1785, 2385, 2510, 4201, *range(1000))


def first_failure(seeds, *, videos=10**9, until_s=float("inf"), **options):
    """Run seeds until one fails or enough videos were made; return the failing run, and the number of videos."""
    videos_made = 0
    with limit_garbage_collection() as collect:
        for seed in seeds:
            result = simulate(seed, **options)
            videos_made += result.videos
            if result.problems:
                return result, videos_made
            if videos_made >= videos or time.perf_counter() > until_s:
                break
            collect()
    return None, videos_made


@pytest.mark.parametrize("seeds", [SEEDS[:9], pytest.param(SEEDS[9:], marks=pytest.mark.thorough)], ids=["few", "many"])
def test_every_request_ends_once_with_its_own_video_whatever_breaks(seeds):
    failed, videos_made = first_failure(seeds, videos=VIDEOS)
    assert failed is None, failed.tell()
    assert videos_made > 100


def test_the_same_seed_is_the_same_story():
    assert simulate(11).story == simulate(11).story


@pytest.mark.soak
def test_no_new_seed_fails():
    """This runs for a quarter of an hour; the figures are in docs/benchmarks.md."""
    start, first = time.perf_counter(), int(time.time())
    seconds = float(os.environ.get("WAN_TPU_SIMULATION_S", "60"))
    cpu = time.process_time()
    failed, videos_made = first_failure(range(first, first + 10**9), until_s=start + seconds)
    print(
        f"{videos_made} videos from seed {first}, {videos_made / (time.process_time() - cpu):.0f} a second of CPU time"
    )
    assert failed is None, failed.tell()


# ---- The simulation can fail: each of these defects was once in the code, and is detected.


def starts_at_the_first_step(patch):
    """A video to be changed begins in the middle of the schedule, but was begun at step 0."""
    patch.setattr(StageMachine, "steps_done", property(lambda machine: machine.step or 0))


def blames_the_request(patch):
    """A full disk of a decoder's host failed request after request as invalid."""
    original = AsyncSlice._classify

    def classify(slice_, method, cause, *, fitted):
        if isinstance(cause, OutputError):
            return RequestFailed(f"{method}: {cause}", "invalid")
        return original(slice_, method, cause, fitted=fitted)

    patch.setattr(AsyncSlice, "_classify", classify)


def asks_ray_on_the_loop(patch):
    """A control store that doesn't answer stopped the leader's event loop."""

    async def seconds_left(leader):
        return leader._dependencies.find_drain_s([host.node_id for host in leader._hosts.hosts])

    patch.setattr(SliceLeader, "_read_seconds_left", seconds_left)


def forgets_while_it_writes(patch):
    """A snapshot that was still being written when its request ended stayed for ever."""

    async def never(request):
        return False

    patch.setattr("actors.slices.snapshots._is_finished", never)


def raises_into_the_work(patch):
    """Reporting a step raised an error after somebody had set the clock, which failed the request."""
    patch.setattr(RequestRun, "_report_span", lambda run, span: run._on_event(span))
    patch.setattr("actors.observe.span.Start.elapsed_s", property(lambda start: time.time() - start.wall_s))


@pytest.mark.long
@pytest.mark.parametrize(
    "defect",
    [
        starts_at_the_first_step,
        *(
            pytest.param(defect, marks=pytest.mark.soak)
            for defect in (asks_ray_on_the_loop, blames_the_request, forgets_while_it_writes, raises_into_the_work)
        ),
    ],
)
def test_a_defect_that_is_put_back_is_found(defect, monkeypatch):
    defect(monkeypatch)
    failed, _ = first_failure(SEEDS, videos=VIDEOS)
    assert failed is not None, "it went through all fixed seeds"
