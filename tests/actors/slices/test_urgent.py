"""A request that is paused for a more urgent one, on simulated slices: overtaken, cancelled, drained, abandoned."""

import asyncio
import dataclasses
import subprocess
import sys
import time

import pytest

from actors.pipeline.driver import PipelineDriver
from actors.pipeline.pools import deploy, open_handle, shut_down
from actors.slices.snapshots import Snapshots
from cluster.connect import connect, leave
from cluster.inventory import list_slices
from cluster.layout import Layout
from scripts.simulation import soak
from tests.cluster.conftest import drain
from tests.conftest import PHOTO, ROOT
from tests.waiting import SECONDS

pytestmark = pytest.mark.soak  # tests/actors/simulation/test_urgent.py shows the same on a virtual clock.

LAYOUT = Layout.parse(
    """
emulate: {devices_per_host: 1}
pools:
  encoder-decoder: {stages: [encoder, decoder], slice: v6e-1}
  experts: {stages: [denoise_high, denoise_low], slice: v6e-1}
""",
    "the test's layout",
)
DRIVER = """
import asyncio, dataclasses, sys
from scripts.simulation import soak
from actors.pipeline.driver import PipelineDriver
from cluster.connect import connect
from tests.actors.slices.test_urgent import LAYOUT, request
from pathlib import Path
address, folder = sys.argv[1:]
connect(address)
spec = soak.soak_spec(Path(folder), 0.1, LAYOUT)
asyncio.run(PipelineDriver(spec).generate(spec.model.plan(request(9, 400)), id="abandoned"))
"""


@pytest.fixture(scope="module")
def running(three_slices, tmp_path_factory):
    """An emulated cluster with a spare slice, a folder, and the pipeline that runs there."""
    folder = tmp_path_factory.mktemp("urgent")
    spec = soak.soak_spec(folder, 0.1, LAYOUT)
    connect(three_slices.address)
    deploy(spec)
    yield three_slices, folder, spec
    shut_down(spec.settings.name)
    leave()


def request(seed, steps):
    return dataclasses.replace(soak.request(seed, PHOTO), steps=steps)


class Making:
    """Requests under way in one driver, with the spans of their steps."""

    def __init__(self, spec):
        self.pipeline = PipelineDriver(spec)
        self._experts = open_handle(spec.settings.name, "experts")
        self.spans, self.tasks, self.ended = {}, {}, []

    def start(self, name, seed, steps, priority=0):
        spans = self.spans.setdefault(name, [])

        async def make():
            plan = self.pipeline.model.plan(request(seed, steps))
            video = await self.pipeline.generate(plan, id=name, on_event=spans.append, priority=priority)
            self.ended.append(name)
            await self.pipeline.forget(name)
            return video

        self.tasks[name] = asyncio.create_task(make())

    def steps(self, name):
        return [span for span in self.spans[name] if span.step is not None]

    async def until(self, reached, reason):
        give_up = time.monotonic() + SECONDS
        while not (reached() if not asyncio.iscoroutinefunction(reached) else await reached()):
            assert time.monotonic() < give_up, reason
            await asyncio.sleep(0.05)

    async def list_holders(self):
        keys = await self._experts.list_host_keys.remote()
        return {key.split()[0] for key in keys}


def within(work):
    return asyncio.run(asyncio.wait_for(work, 2 * SECONDS))


def numbers(steps):
    return [span.step for span in steps]


def test_urgent_request_passes_all_that_wait_though_the_slice_is_full(running):
    _, _, spec = running

    async def run():
        making = Making(spec)
        making.start("low0", 0, 100)
        await making.until(lambda: making.steps("low0"), "low0 steps")
        for i in range(1, 6):  # more than the slice takes
            making.start(f"low{i}", i, 5)
            await asyncio.sleep(0.3)
        making.start("urgent", 7, 10, priority=1)
        await asyncio.gather(*making.tasks.values())
        return making

    making = within(run())
    assert making.ended[:2] == ["urgent", "low0"]
    for i in range(6):
        assert numbers(making.steps(f"low{i}")) == list(range(1, 6 if i else 101))
    urgent = making.steps("urgent")
    assert numbers(urgent) == list(range(1, 11))
    start_s, end_s = urgent[0].start_s, urgent[-1].end_s
    for i in range(6):
        assert not [s for s in making.steps(f"low{i}") if s.end_s > start_s + 0.01 and s.start_s < end_s - 0.01]
    assert [s for s in making.steps("low0") if s.end_s <= start_s + 0.01], "low0 was not overtaken in the middle"


def test_request_cancelled_while_paused_goes_on_from_there_later(running):
    _, _, spec = running

    async def run():
        making = Making(spec)
        making.start("low", 1, 40)
        await making.until(lambda: len(making.steps("low")) >= 5, "low steps")
        making.start("urgent", 2, 1000, priority=1)
        await making.until(lambda: making.steps("urgent"), "urgent steps")
        snapshots = Snapshots(spec.settings.snapshots)

        def kept_as_paused():  # of the last step: its span may come after the first of the urgent one
            return any(f".{len(making.steps('low')):04d}." in name for name in snapshots.list_names("low"))

        await making.until(kept_as_paused, "a snapshot of it")
        making.tasks["low"].cancel()
        with pytest.raises(asyncio.CancelledError):
            await making.tasks["low"]

        async def is_dropped():
            return await making.list_holders() == {"urgent"}

        await making.until(is_dropped, "its arrays are dropped")
        assert not making.tasks["urgent"].done()
        making.start("low", 1, 40)
        making.tasks["urgent"].cancel()
        await making.tasks["low"]
        return making

    making = within(run())
    assert numbers(making.steps("low")) == list(range(1, 41))


def test_one_whose_driver_died_is_dropped_while_it_is_paused(running):
    cluster, folder, spec = running

    async def run():
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, cluster.address, str(folder)], cwd=ROOT)
        try:
            making = Making(spec)

            async def is_there():
                return "abandoned" in await making.list_holders()

            await making.until(is_there, "the other driver's request is there")
            making.start("urgent", 2, 1000, priority=1)
            await making.until(lambda: making.steps("urgent"), "urgent steps")
            assert await making.list_holders() == {"abandoned", "urgent"}
        finally:
            driver.kill()
            driver.wait(10)

        async def is_dropped():
            return await making.list_holders() == {"urgent"}

        await making.until(is_dropped, "it is dropped")
        assert not making.tasks["urgent"].done()
        making.tasks["urgent"].cancel()
        await asyncio.wait([making.tasks["urgent"]])

    within(run())


def test_a_drain_moves_what_is_paused_at_once(running):
    cluster, _, spec = running

    async def run():
        making = Making(spec)
        making.start("moved", 1, 60)
        await making.until(lambda: len(making.steps("moved")) >= 5, "low steps")
        making.start("overtakes", 2, 300, priority=1)
        await making.until(lambda: making.steps("overtakes"), "urgent steps")
        [left] = [s for s in list_slices() if s.holder is not None and s.holder.startswith("experts/")]
        await asyncio.to_thread(drain, cluster, left.hosts[0].node_id, 900)

        async def has_moved():
            return await making.list_holders() == {"overtakes"}

        await making.until(has_moved, "it leaves the slice")
        assert not making.tasks["overtakes"].done()
        await asyncio.gather(*making.tasks.values())
        return making, left.name

    making, slice_name = within(run())
    cluster.kill_host(slice_name, 0)  # Ray has ended it, or will
    cluster.add_host(slice_name, 0)
    low, overtakes = making.steps("moved"), making.steps("overtakes")
    assert numbers(low) == list(range(1, 61)) and numbers(overtakes) == list(range(1, 301))
    assert len({span.slice for span in low}) == 2  # it is done elsewhere, none of its steps twice
    assert len({span.slice for span in overtakes}) == 1  # there was time for this one
