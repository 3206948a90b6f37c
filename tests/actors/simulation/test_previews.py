"""Previews of unfinished videos reach whoever asked for them, and change nothing else."""

import asyncio

import pytest

from tests.actors.simulation.checks import find_leftovers
from tests.actors.simulation.scenario import LAYOUTS, Run
from tests.actors.simulation.slices import video_of
from tests.actors.simulation.submissions import plan_of
from tests.actors.simulation.virtual_time import virtual_time
from tests.actors.simulation.world import World

PLAN = plan_of(8, "text", "video 7", 7)


def make(layout, on_preview):
    """Make one video; return it and the seconds that it took."""
    with virtual_time() as loop:

        async def live():
            run = Run(World(loop, 0), requests=0, faults=False, layout_name=layout, slices=2, drivers=1)
            await asyncio.sleep(10.0)  # Its replicas start.
            start_s = loop.time()
            engine = run.drivers[0].engine
            making = engine.generate(PLAN, id="r", on_event=lambda span: None, on_preview=on_preview)
            video = await asyncio.wait_for(making, 600.0)
            seconds = loop.time() - start_s
            await engine.forget("r")
            await asyncio.sleep(30.0)
            assert not find_leftovers(run)
            return video, seconds

        return loop.run_until_complete(live())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_previews_arrive_in_order_and_the_video_is_the_same(layout):
    pictures = []
    plain, plain_s = make(layout, None)
    shown, shown_s = make(layout, pictures.append)
    assert shown == plain and shown.mp4 == video_of(PLAN)
    assert shown_s == plain_s
    # The picture of a step comes with the next step of the same pool. One may be lost where the pools change.
    steps = [picture.step for picture in pictures]
    assert steps == sorted(steps) and set(steps) <= {2, 4, 6} and len(steps) >= 2
    assert len({picture.jpeg for picture in pictures}) == len(pictures)


def test_a_failing_callback_fails_no_video():
    calls = []

    def fail(picture):
        calls.append(picture.step)
        raise RuntimeError("no room for a picture")

    plain, plain_s = make("four pools", None)
    failed, failed_s = make("four pools", fail)
    assert len(calls) >= 2
    assert failed == plain and failed_s == plain_s
