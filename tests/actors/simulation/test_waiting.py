"""Requests that wait at a slice move to another that is free, and leave one that will be taken away."""

import asyncio

import pytest

from actors.errors import RequestFailed
from tests.actors.simulation.scenario import Run
from tests.actors.simulation.submissions import plan_of
from tests.actors.simulation.virtual_time import virtual_time
from tests.actors.simulation.world import SECONDS, World
from wan_tpu.errors import InvalidRequest, Unavailable

STEPS = 10


def run_scenario(scenario, slices=4, layout="two pools"):
    """Run a scenario on a pipeline without faults; return its result, and how many virtual seconds it took."""
    with virtual_time() as loop:

        async def live():
            run = Run(World(loop, 0), requests=0, faults=False, layout_name=layout, slices=slices, drivers=1)
            await asyncio.sleep(10.0)  # its replicas start
            start_s = loop.time()
            return await scenario(run), loop.time() - start_s

        return loop.run_until_complete(live())


def make(run, number, **options):
    plan = plan_of(options.pop("steps", STEPS), "text", f"video {number}", number)
    return asyncio.ensure_future(run.drivers[0].engine.generate(plan, id=f"request-{number}", **options))


def test_requests_that_wait_at_a_busy_slice_take_those_that_come_later():
    """After all slices but one were preempted, the requests that wait at that one must use slices that come back."""

    async def scenario(run):
        pool = run.pools["experts"]
        for replica in pool.replicas[1:]:
            replica.pool.replicas.remove(replica)
            replica.kill("it was preempted")
        waiting = [make(run, i) for i in range(12)]
        await asyncio.sleep(15.0)
        for _ in range(3):
            pool.grow()
        await asyncio.gather(*waiting)

    _, seconds = run_scenario(scenario)
    assert seconds < 15 + 12 * STEPS * SECONDS["step"] / 4 + 30  # It would take 120 s on the first slice alone.


def test_slice_that_is_drained_without_a_deadline_does_not_draw_requests():
    """Such a slice has the fewest calls, since it refuses them."""

    async def scenario(run):
        pool = run.pools["experts"]
        long = make(run, 0, steps=200)
        await asyncio.sleep(5.0)
        [busy] = [replica for replica in pool.replicas if replica.streams]
        pool.drain(busy, 1e6)
        await asyncio.sleep(5.0)
        started_s = run.world.loop.time()
        await asyncio.gather(*(make(run, i) for i in range(1, 7)))
        took_s = run.world.loop.time() - started_s
        long.cancel()
        await asyncio.wait([long])
        return took_s

    took_s, _ = run_scenario(scenario, slices=2)
    assert took_s < 6 * STEPS * SECONDS["step"] + 15


@pytest.mark.parametrize(("error", "outcome"), [(InvalidRequest("no such file"), "made"), (Unavailable("no"), "made")])
def test_file_that_one_slice_cannot_read_is_asked_of_another(error, outcome):
    """The folder of shared inputs isn't mounted on one host of two, which fails fastest and has the fewest calls."""

    async def scenario(run):
        sick = run.pools["encoder-decoder"].replicas[0]

        def refuse(requests, request):
            raise error

        sick.slice.host.prepare_encode = refuse
        waiting = [
            run.drivers[0].engine.generate(plan_of(2, "image", f"video {i}", i), id=f"request-{i}") for i in range(6)
        ]
        await asyncio.gather(*waiting)
        return "made"

    assert run_scenario(scenario, slices=2)[0] == outcome


def test_file_that_no_slice_can_read_is_the_request_s_fault():
    async def scenario(run):
        def refuse(requests, request):
            raise InvalidRequest("no such file")

        for replica in run.pools["encoder-decoder"].replicas:
            replica.slice.host.prepare_encode = refuse
        await run.drivers[0].engine.generate(plan_of(2, "image", "video", 1), id="request")

    with pytest.raises(RequestFailed, match="no such file") as raised:
        run_scenario(scenario, slices=2)
    assert raised.value.code == "invalid"
