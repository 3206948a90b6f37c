"""Videos denoised chunk by chunk: each chunk is decoded while the next one is denoised, even after losses."""

import asyncio

import pytest

from actors.errors import RequestFailed
from tests.actors.simulation.checks import check_fragments, find_leftovers
from tests.actors.simulation.scenario import LAYOUTS, Run, limit_garbage_collection, simulate
from tests.actors.simulation.slices import video_of
from tests.actors.simulation.submissions import CHUNKS, Submission, plan_of
from tests.actors.simulation.virtual_time import virtual_time
from tests.actors.simulation.world import SECONDS, World

STEPS = 3  # The number of steps per chunk.
PLAN = plan_of(STEPS, "chunks", "video 7", 7)
VIDEOS = 200


def make(layout="four pools", at_s=None, fault=None, plan=PLAN):
    """Make one video with a fault after some seconds; return the run, the fragments with their times, and the time."""
    with virtual_time() as loop:

        async def live():
            run = Run(World(loop, 0), requests=0, faults=False, layout_name=layout, slices=2, drivers=1)
            await asyncio.sleep(10.0)  # Its replicas start.
            start_s, fragments = loop.time(), []
            making = asyncio.ensure_future(
                run.drivers[0].engine.generate(
                    plan, id="r", on_event=lambda span: None, on_fragment=lambda f: fragments.append((loop.time(), f))
                )
            )
            if fault is not None:
                await asyncio.sleep(at_s)
                fault(run, making)
            await asyncio.wait([making], timeout=600.0)
            assert making.done(), "the request hangs"
            seconds = loop.time() - start_s
            await run.drivers[0].engine.forget("r")
            await asyncio.sleep(30.0)
            assert not find_leftovers(run)
            if not making.cancelled():
                assert making.result().mp4 == video_of(plan)
                submission = Submission("r", plan, 0, 0.0, fragments=[fragment for _, fragment in fragments])
                assert not list(check_fragments(submission))
            return run, fragments, seconds

        return loop.run_until_complete(live())


def times(seconds):
    return [0.4 + 0.6 * i for i in range(int(seconds / 0.6))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunk_is_decoded_while_the_next_one_is_denoised(layout):
    run, fragments, seconds = make(layout)
    decoded, steps = run.world.decoded["r"], run.world.steps["r"]
    assert [chunks for chunks, _, _ in decoded] == [1, 2, 3]
    assert len({slice_ for _, _, slice_ in decoded}) == 1  # One slice decodes all chunks, because the file stays open.
    ends_s = [when for _, when, _ in steps][STEPS - 1 :: STEPS]
    for i in range(CHUNKS - 1):
        assert ends_s[i] < decoded[i][1] < ends_s[i + 1]
    assert fragments[0][0] < ends_s[-2]
    alone_s = CHUNKS * (STEPS * SECONDS["step"] + SECONDS["decode"])
    if layout != "one pool":
        assert seconds < alone_s + 1.0


def test_place_is_taken_only_while_a_chunk_is_decoded():
    busy = []

    def watch(run, making):
        async def look():
            while not making.done():
                queues = [replica.leader._runner.scheduler.other_places for replica in run.pools["vae"].replicas]
                busy.append(any(queue._inside for queue in queues))
                await asyncio.sleep(0.05)

        run.watching = asyncio.ensure_future(look())

    make(at_s=0.0, fault=watch)
    assert 0 < 0.05 * sum(busy) < CHUNKS * (SECONDS["decode"] + 0.4)


def test_decoder_that_is_lost_at_any_point_costs_no_step():
    _, _, seconds = make()
    repeated = 0
    for at_s in times(seconds):

        def lose(run, making):
            for replica in run.pools["vae"].replicas:
                if replica.streams:
                    replica.kill("it was preempted")

        run, _, _ = make(at_s=at_s, fault=lose)
        assert [step for step, _, _ in run.world.steps["r"]] == list(range(1, CHUNKS * STEPS + 1))
        repeated += len(run.world.decoded["r"]) > CHUNKS
    assert repeated > 3  # The loss happened in the middle of the video.


@pytest.mark.parametrize("pool", ["high", "low"])
def test_decoder_goes_on_when_a_denoiser_is_lost_at_any_point(pool):
    _, _, seconds = make()
    for at_s in times(seconds):

        def lose(run, making):
            for replica in run.pools[pool].replicas:
                if replica.streams:
                    replica.kill("it was preempted")

        run, _, _ = make(at_s=at_s, fault=lose)
        assert [chunks for chunks, _, _ in run.world.decoded["r"]] == [1, 2, 3]


def test_chunk_that_is_evicted_at_any_point_is_taken_from_the_state():
    _, _, seconds = make()
    for at_s in times(seconds):

        def evict(run, making):
            for refs in run.drivers[0].ref_store._scopes.values():
                for key, ref in refs.items():
                    ref.is_evicted |= key.startswith("chunk ")
            for replica in run.pools["vae"].replicas:
                if replica.streams:
                    replica.kill("it was preempted")

        run, _, _ = make(at_s=at_s, fault=evict)
        assert [step for step, _, _ in run.world.steps["r"]] == list(range(1, CHUNKS * STEPS + 1))


@pytest.mark.parametrize("published", range(1, CHUNKS + 1))
def test_chunk_that_a_restarted_store_has_lost_is_waited_for_by_nobody(published):
    def restart(run, making):
        store = run.drivers[0].ref_store

        async def look():
            while sum(key.startswith("chunk ") for refs in store._scopes.values() for key in refs) < published:
                await asyncio.sleep(0.01)
            store.__init__()

        run.watching = asyncio.ensure_future(look())

    make(at_s=0.0, fault=restart)


def test_slice_goes_on_for_others_while_a_driver_s_store_is_silent():
    with virtual_time() as loop:

        async def live():
            run = Run(World(loop, 0), requests=0, faults=False, layout_name="one pool", slices=1, drivers=2)
            await asyncio.sleep(10.0)  # Its replica starts.
            first, second = (driver.engine for driver in run.drivers)
            making = asyncio.ensure_future(first.generate(PLAN, id="first"))
            while run.world.steps.get("first", [(0, 0, 0)])[-1][0] < STEPS - 1:
                await asyncio.sleep(0.05)
            run.drivers[0].handle.silent_until_s, start_s = loop.time() + 100.0, loop.time()
            await second.generate(plan_of(STEPS, "chunks", "video 8", 8), id="second")
            assert loop.time() - start_s < 50.0
            assert (await making).mp4 == video_of(PLAN)
            for engine, id in ((first, "first"), (second, "second")):
                await engine.forget(id)
            await asyncio.sleep(30.0)
            assert not find_leftovers(run)

        loop.run_until_complete(live())


def test_chunk_that_can_t_be_decoded_ends_the_request_before_all_steps_are_done():
    with virtual_time() as loop:

        async def live():
            run = Run(World(loop, 0), requests=0, faults=False, layout_name="four pools", slices=2, drivers=1)
            await asyncio.sleep(10.0)  # Its replicas start.
            engine = run.drivers[0].engine
            with pytest.raises(RequestFailed, match="the frames are NaN"):
                await engine.generate(plan_of(STEPS, "chunks", "dark video", 7), id="r")
            assert len(run.world.steps["r"]) <= 2 * STEPS
            await engine.forget("r")
            await asyncio.sleep(30.0)
            assert not find_leftovers(run)

        loop.run_until_complete(live())


def test_cancelled_request_ends_both_at_any_point():
    _, _, seconds = make()
    for at_s in times(seconds):
        _, _, took_s = make(at_s=at_s, fault=lambda run, making: making.cancel())
        assert took_s < at_s + 2.0


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 1000), marks=pytest.mark.thorough)], ids=["few", "many"]
)
def test_every_video_in_chunks_is_its_own_whatever_breaks(seeds):
    videos = 0
    with limit_garbage_collection() as collect:
        for seed in seeds:
            result = simulate(seed, in_chunks=True)
            assert not result.problems, result.tell()
            videos += result.videos
            if videos >= VIDEOS:
                break
            collect()
