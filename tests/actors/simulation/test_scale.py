"""What a request costs its driver, the router, the queues and the status doesn't grow with the number of slices."""

import asyncio
import gc
import logging
import os
import random
import time

import pytest

from tests.actors.simulation.scenario import Run, little_garbage
from tests.actors.simulation.submissions import plan_of
from tests.actors.simulation.virtual_time import virtual_time
from tests.actors.simulation.world import SECONDS, World

STEPS = 4
LOAD = 0.8  # Of what the experts' slices can do.


@pytest.fixture(autouse=True)
def quiet():
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


def cost(slices, requests):
    """Return CPU seconds that a request takes with so many slices, once all replicas run; and the virtual seconds."""
    with virtual_time() as loop, little_garbage():
        figures = []

        async def live():
            world = World(loop, 0)
            named = {"layout_name": "two pools", "slices": slices, "drivers": 4, "health_s": 0}
            run = Run(world, requests=0, faults=False, in_flight=10_000, **named)
            await asyncio.sleep(20.0)
            every_s = STEPS * SECONDS["step"] / slices / LOAD
            chance, waiting = random.Random(1), []

            async def one(number):
                engine = run.drivers[number % 4].engine
                plan = plan_of(STEPS, "text", f"video {number}", number)
                await engine.generate(plan, id=f"request-{number}", priority=chance.choice((0, 0, 0, 1)))
                await engine.forget(f"request-{number}")

            start_s, cpu_s = loop.time(), time.process_time()
            for number in range(requests):
                waiting.append(loop.create_task(one(number)))
                await asyncio.sleep(every_s)
                if number % 4000 == 3999:  # A day of them would fill the memory of a test.
                    done, _ = await asyncio.wait(waiting[:3000])
                    assert all(task.exception() is None for task in done)
                    del waiting[:3000]
                    gc.collect()
            await asyncio.gather(*waiting)
            figures.append(((time.process_time() - cpu_s) / requests, loop.time() - start_s))

        loop.run_until_complete(live())
    return figures[0]


@pytest.mark.soak
def test_request_costs_as_much_with_a_thousand_slices_as_with_ten():
    cost(10, 300)  # what is made once is made
    costs = {slices: min(cost(slices, max(600, 2 * slices))[0] for _ in range(2)) for slices in (10, 100, 1000)}
    print({slices: f"{1000 * seconds:.2f} ms" for slices, seconds in costs.items()})
    assert costs[100] < 1.2 * costs[10] and costs[1000] < 1.2 * costs[10], costs


@pytest.mark.soak
def test_day_of_a_thousand_slices():
    requests = int(os.environ.get("WAN_TPU_SIMULATED_DAY", "20000"))
    seconds, virtual_s = cost(1000, requests)
    print(f"{requests} requests over 1,000 slices: {1000 * seconds:.2f} ms each, {virtual_s / 3600:.2f} virtual hours")
