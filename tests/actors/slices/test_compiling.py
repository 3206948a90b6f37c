"""A call in which the first host compiles is told from one that computes."""

import asyncio
import threading

import pytest

from actors.reliability import ReliabilitySettings
from actors.slices import async_slice
from actors.slices.async_slice import AsyncSlice
from actors.slices.fragments import run_concurrently
from actors.slices.messages import HostProgress
from cluster.gang.slice import Returned


class Hosts:
    """A gang whose calls compile for a while, then compute."""

    name, timeouts = "hosts", ReliabilitySettings()

    def __init__(self):
        self.compiled, self.computing, self.computed = threading.Event(), threading.Event(), threading.Event()

    def call(self, method, *args, lane, timeout_s, on_progress):
        if on_progress is not None:
            on_progress(HostProgress("step", 0, 1, within_s=1800.0))
            assert self.compiled.wait(60)
            on_progress(HostProgress("step", 0, 1))
        self.computing.set()
        assert self.computed.wait(60)
        return Returned((1.0,), None)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(async_slice, "COMPILING_S", 0.01)
    monkeypatch.setattr(async_slice, "_LOOK_S", 0.01)


def test_call_that_compiles_is_found_while_it_does():
    async def run():
        hosts = Hosts()
        slice_ = AsyncSlice(hosts, lambda lost: lost)
        async with run_concurrently(slice_.call("step")) as stepping:
            waiting = asyncio.create_task(slice_.call("step"))  # It has its turn after this one.
            not_yet = asyncio.create_task(slice_.find_compiling(waiting))
            since = await slice_.find_compiling(stepping)
            assert since is not None and since.elapsed_s >= 0.01
            await asyncio.sleep(0.1)
            assert not not_yet.done()
            hosts.compiled.set()
            assert await asyncio.to_thread(hosts.computing.wait, 60)
            later = asyncio.create_task(slice_.find_compiling(stepping))
            await asyncio.sleep(0.1)
            assert not later.done()
            hosts.computed.set()
            assert await later is None
            assert (await stepping).value == (await waiting).value == (1.0,)

    asyncio.run(run())


def test_call_of_another_lane_says_nothing_about_the_compiler():
    async def run():
        hosts = Hosts()
        hosts.computed.set()
        slice_ = AsyncSlice(hosts, lambda lost: lost)
        async with run_concurrently(slice_.side("prepare_denoise")) as preparing:
            assert await slice_.find_compiling(preparing) is None

    asyncio.run(run())
