"""Urgent requests are urgent, however many drivers share the slices."""

import asyncio

import pytest

from tests.actors.simulation.scenario import Run
from tests.actors.simulation.submissions import plan_of
from tests.actors.simulation.virtual_time import virtual_time
from tests.actors.simulation.world import SECONDS, World

ARRIVES_S = 30.0


@pytest.mark.parametrize("layout", ["four pools", "two pools", "one pool"])
@pytest.mark.parametrize("drivers", [1, 2, 3])
def test_urgent_request_waits_for_no_more_than_a_step_and_its_own_encoding(drivers, layout):
    """The urgent request's driver came last, and requests of other drivers wait at all slices."""
    with virtual_time() as loop:
        began = []

        async def live():
            run = Run(World(loop, 0), requests=0, faults=False, layout_name=layout, slices=2, drivers=drivers)
            await asyncio.sleep(10.0)  # its replicas start
            engines = [driver.engine for driver in run.drivers]
            others = [
                engine.generate(plan_of(30, "text", f"other {i} of {n}", i), id=f"other-{n}-{i}")
                for n, engine in enumerate(engines)
                for i in range(16)
            ]
            waiting = [asyncio.ensure_future(other) for other in others]
            await asyncio.sleep(ARRIVES_S)
            arrival_s = loop.time()

            def note(span):
                if span.step == 1:
                    began.append(loop.time() - SECONDS["step"] - arrival_s)

            urgent = engines[-1].generate(plan_of(6, "text", "urgent", 99), id="urgent", on_event=note, priority=1)
            await urgent
            for other in waiting:
                other.cancel()
            await asyncio.wait(waiting)

        loop.run_until_complete(live())
    # With a single pool, the urgent request's prompts are also encoded between two steps of the other requests.
    assert began[0] < 3 * SECONDS["step"] + 1.0
