"""The work of a request (driver, router, queues, status) does not grow with the number of slices."""

import asyncio
import cProfile
import gc
import os
import pstats
import random
import time

import pytest

from tests.actors.simulation.scenario import Run, limit_garbage_collection
from tests.actors.simulation.submissions import plan_of
from tests.actors.simulation.virtual_time import virtual_time
from tests.actors.simulation.world import SECONDS, World

STEPS = 4
LOAD = 0.8  # The fraction of time for which the experts' slices are busy.


def measure_cost(slices, requests, load=LOAD, profiler=None):
    """Return the CPU seconds per request with this many slices, once all replicas run, and the virtual seconds.

    A profiler, if given, counts function calls while requests are served.
    """
    with virtual_time() as loop, limit_garbage_collection():
        figures = []

        async def live():
            world = World(loop, 0)
            options = {"layout_name": "two pools", "slices": slices, "drivers": 4, "health_s": 0}
            run = Run(world, requests=0, faults=False, **options)
            await asyncio.sleep(20.0)
            every_s = STEPS * SECONDS["step"] / slices / load
            chance, waiting = random.Random(1), []

            async def generate(number):
                engine = run.drivers[number % 4].engine
                plan = plan_of(STEPS, "text", f"video {number}", number)
                await engine.generate(plan, id=f"request-{number}", priority=chance.choice((0, 0, 0, 1)))
                await engine.forget(f"request-{number}")

            start_s, cpu_s = loop.time(), time.process_time()
            if profiler is not None:
                profiler.enable()
            for number in range(requests):
                waiting.append(loop.create_task(generate(number)))
                await asyncio.sleep(every_s)
                if number % 4000 == 3999:  # Records of a whole day's requests would fill a test's memory.
                    done, _ = await asyncio.wait(waiting[:3000])
                    assert all(task.exception() is None for task in done)
                    del waiting[:3000]
                    gc.collect()
            await asyncio.gather(*waiting)
            if profiler is not None:
                profiler.disable()
            figures.append(((time.process_time() - cpu_s) / requests, loop.time() - start_s))

        loop.run_until_complete(live())
    return figures[0]


def count_calls(slices):
    """Return the number of function calls per request, which doesn't depend on the machine."""
    with cProfile.Profile() as profiler:
        profiler.disable()
        measure_cost(slices, 300, profiler=profiler)
    return pstats.Stats(profiler).total_calls / 300


@pytest.mark.thorough
@pytest.mark.long
def test_request_is_as_much_work_with_a_thousand_slices_as_with_ten():
    """This counts calls, because seconds also grow when the requests under way don't fit into the CPU's caches."""
    calls = {slices: count_calls(slices) for slices in (10, 1000)}
    print({slices: f"{count:.0f} calls" for slices, count in calls.items()})
    assert calls[1000] < 1.1 * calls[10], calls


@pytest.mark.soak
def test_request_costs_little_whatever_the_number_of_slices():
    measure_cost(10, 300)  # Fills what is cached.
    for slices, load in ((10, LOAD), (1000, LOAD * 10 / 1000), (100, LOAD), (1000, LOAD)):
        seconds = min(measure_cost(slices, 1000, load)[0] for _ in range(3))
        print(f"{slices} slices, {load * slices:.0f} busy: {1000 * seconds:.2f} ms a request")


@pytest.mark.soak
def test_thousand_slices_work_a_simulated_day():
    requests = int(os.environ.get("WAN_TPU_SIMULATED_DAY", "20000"))
    seconds, virtual_s = measure_cost(1000, requests)
    print(f"{requests} requests over 1,000 slices: {1000 * seconds:.2f} ms each, {virtual_s / 3600:.2f} virtual hours")
