"""A request that holds still for a more urgent one, on simulated slices: overtaken, cancelled, drained, abandoned."""

import asyncio
import dataclasses
import subprocess
import sys
import time

import pytest

from actors import soak
from actors.pipeline import Pipeline
from actors.pools import deploy, shut_down
from actors.snapshots import Snapshots
from cluster.connect import connect, leave
from cluster.emulated import EmulatedCluster, EmulatedSlice
from cluster.inventory import slices_found
from cluster.layout import Layout
from cluster.slice_spec import SliceSpec
from tests.cluster.conftest import drain
from tests.conftest import PHOTO, ROOT
from wan_tpu.expert import STAGES, TOGETHER

pytestmark = pytest.mark.long

SECONDS = 120
LAYOUT = Layout.parse(
    """
emulate: {devices_per_host: 1}
pools:
  ends: {stages: [encoder, decoder], slice: v6e-1}
  experts: {stages: [denoise_high, denoise_low], slice: v6e-1}
""",
    "the test's layout",
    STAGES,
    TOGETHER,
)
DRIVER = """
import asyncio, dataclasses, sys
from actors import soak
from actors.pipeline import Pipeline
from cluster.connect import connect
from tests.actors.test_urgent import LAYOUT, request
from pathlib import Path
address, folder = sys.argv[1:]
connect(address)
settings = soak.settings(Path(folder), step_s=0.1)
asyncio.run(Pipeline(LAYOUT, settings).generate(request(9, 400), id="abandoned"))
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """An emulated cluster with a spare slice, its folder, and the settings of the pipeline that runs there."""
    folder = tmp_path_factory.mktemp("urgent")
    settings = soak.settings(folder, step_s=0.1)
    slices = (*LAYOUT.emulated_slices(), EmulatedSlice("spare", SliceSpec("v6e-1"), 1))
    with EmulatedCluster.start(slices, folder=folder) as cluster:
        connect(cluster.address)
        deploy(LAYOUT, settings)
        yield cluster, folder, settings
        shut_down(settings.name)
        leave()


def request(seed, steps):
    return dataclasses.replace(soak.request(seed, PHOTO), steps=steps)


class Making:
    """Requests under way in one driver, with the spans of their steps."""

    def __init__(self, settings):
        self.pipeline = Pipeline(LAYOUT, settings)
        self.spans, self.tasks, self.ended = {}, {}, []

    def start(self, name, seed, steps, priority=0):
        spans = self.spans.setdefault(name, [])

        async def make():
            made = await self.pipeline.generate(request(seed, steps), id=name, on_event=spans.append, priority=priority)
            self.ended.append(name)
            return made

        self.tasks[name] = asyncio.create_task(make())

    def steps(self, name):
        return [span for span in self.spans[name] if span.step is not None]

    async def until(self, reached, what):
        give_up = time.monotonic() + SECONDS
        while not (reached() if not asyncio.iscoroutinefunction(reached) else await reached()):
            assert time.monotonic() < give_up, what
            await asyncio.sleep(0.05)

    async def held(self):
        found = await self.pipeline.call("denoise_high", stream=False).held.remote()
        return {key.split()[0] for key in found}


def within(work):
    return asyncio.run(asyncio.wait_for(work, 2 * SECONDS))


def numbers(steps):
    return [span.step for span in steps]


def test_it_passes_all_that_wait_though_every_place_is_taken(running):
    _, _, settings = running

    async def run():
        making = Making(settings)
        for i in range(6):  # more than the slice has places for
            making.start(f"low{i}", i, 20)
            await asyncio.sleep(0.3)
        await making.until(lambda: len(making.steps("low0")) >= 3, "low0 steps")
        making.start("urgent", 7, 10, priority=1)
        await asyncio.gather(*making.tasks.values())
        return making

    making = within(run())
    assert making.ended == ["urgent", *(f"low{i}" for i in range(6))]
    for i in range(6):
        assert numbers(making.steps(f"low{i}")) == list(range(1, 21))
    urgent = making.steps("urgent")
    assert numbers(urgent) == list(range(1, 11))
    begun, ended = urgent[0].start_s, urgent[-1].end_s
    for i in range(6):
        assert not [s for s in making.steps(f"low{i}") if s.end_s > begun + 0.01 and s.start_s < ended - 0.01]
    assert [s for s in making.steps("low0") if s.end_s <= begun + 0.01], "low0 was not overtaken in the middle"


def test_what_is_cancelled_while_it_holds_still_goes_on_from_there_later(running):
    _, _, settings = running

    async def run():
        making = Making(settings)
        making.start("low", 1, 40)
        await making.until(lambda: len(making.steps("low")) >= 5, "low steps")
        making.start("urgent", 2, 30, priority=1)
        await making.until(lambda: making.steps("urgent"), "urgent steps")
        done = len(making.steps("low"))
        kept = Snapshots(settings.snapshots)
        await making.until(lambda: any(f".{done:04d}." in name for name in kept.names("low")), "a snapshot of it")
        making.tasks["low"].cancel()
        with pytest.raises(asyncio.CancelledError):
            await making.tasks["low"]

        async def gone():
            return await making.held() == {"urgent"}

        await making.until(gone, "its arrays are let go of")
        assert not making.tasks["urgent"].done()
        making.start("low", 1, 40)
        await asyncio.gather(*making.tasks.values())
        return making

    making = within(run())
    assert numbers(making.steps("low")) == list(range(1, 41))
    assert numbers(making.steps("urgent")) == list(range(1, 31))


def test_one_whose_driver_died_is_let_go_of_while_it_holds_still(running):
    cluster, folder, settings = running

    async def run():
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, cluster.address, str(folder)], cwd=ROOT)
        try:
            making = Making(settings)

            async def begun():
                return "abandoned" in await making.held()

            await making.until(begun, "the other driver's request is there")
            making.start("urgent", 2, 300, priority=1)
            await making.until(lambda: making.steps("urgent"), "urgent steps")
            assert await making.held() == {"abandoned", "urgent"}
        finally:
            driver.kill()
            driver.wait(10)

        async def gone():
            return await making.held() == {"urgent"}

        await making.until(gone, "it is let go of")
        assert not making.tasks["urgent"].done()
        making.tasks["urgent"].cancel()
        await asyncio.wait([making.tasks["urgent"]])

    within(run())


def test_a_drain_moves_what_holds_still_at_once(running):
    cluster, _, settings = running

    async def run():
        making = Making(settings)
        making.start("moved", 1, 60)
        await making.until(lambda: len(making.steps("moved")) >= 5, "low steps")
        making.start("overtakes", 2, 300, priority=1)
        await making.until(lambda: making.steps("overtakes"), "urgent steps")
        [left] = [s for s in slices_found() if s.holder is not None and s.holder.startswith("experts/")]
        await asyncio.to_thread(drain, cluster, left.hosts[0].node_id, 90)

        async def moved():
            return await making.held() == {"overtakes"}

        await making.until(moved, "it leaves the slice")
        assert not making.tasks["overtakes"].done()
        await asyncio.gather(*making.tasks.values())
        return making

    making = within(run())
    low, overtakes = making.steps("moved"), making.steps("overtakes")
    assert numbers(low) == list(range(1, 61)) and numbers(overtakes) == list(range(1, 301))
    assert len({span.slice for span in low}) == 2  # it is done elsewhere, none of its steps twice
    assert len({span.slice for span in overtakes}) == 1  # there was time for this one
