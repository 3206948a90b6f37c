"""Payloads between stages, on simulated slices: nothing is left behind, nothing is held longer than it is needed."""

import asyncio
import dataclasses
import math
import os
import signal
import time

import numpy as np
import psutil
import pytest
import ray

from actors.errors import InputLost
from actors.observe.status_actor import StatusActor
from actors.pipeline.driver import PipelineDriver
from actors.pipeline.pools import deploy, shut_down
from actors.slices.references import RefStore
from cluster.connect import connect, leave
from cluster.emulation.ray_nodes import processes
from cluster.inventory import list_slices
from scripts.simulation import soak
from scripts.simulation.memory import growth, store_mib
from scripts.simulation.simulated import simulated_video
from tests.conftest import PHOTO
from tests.waiting import SECONDS

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def running(three_slices, tmp_path_factory):
    """An emulated cluster, and the pipeline that runs there."""
    spec = soak.soak_spec(tmp_path_factory.mktemp("soak"), step_s=0.02)
    connect(three_slices.address)
    deploy(spec)
    yield three_slices, spec
    shut_down(spec.settings.name)
    leave()


def within(work):
    return asyncio.run(asyncio.wait_for(work, SECONDS))


def slice_of(pool):
    return next(slice_.name for slice_ in list_slices() if (slice_.holder or "").startswith(f"{pool}/"))


def kill_host_process(cluster, name):
    [victim] = [p for p in processes(cluster.temp / f"{name}-0") if "HostActor" in p.name()]
    os.kill(victim.pid, signal.SIGKILL)
    return victim.pid


@pytest.mark.soak
def test_requests_leave_nothing_behind(running):
    cluster, spec = running
    temp = cluster.temp
    samples = within(soak.soak(spec, 36, temp=temp, image=PHOTO, a_round=6))
    assert len(samples) == 6
    # One request has 2.4 MiB of payloads in the store: a leak of one in ten would be 8.6 MiB after 36.
    assert samples[-1].store_mib < 1.5, samples
    grown = growth(samples, warm=12)
    assert set(grown) >= {"driver", "replicas", "hosts", "status", "references", "Serve controller"}
    # 12 requests between the halves' medians: payloads held by a process would be 29 MiB.
    assert max(grown.values()) < 10, grown
    assert StatusActor.find(spec.settings.name).read().requests == {}
    assert not list((temp / "snapshots").rglob("*.safetensors"))


@pytest.mark.soak
def test_a_stage_s_inputs_are_freed_while_it_runs_and_made_again_when_it_is_lost(running):
    """A host is killed after the inputs of its request have left the store."""
    cluster, spec = running
    request = dataclasses.replace(soak.request(7, PHOTO), steps=200)  # half of them low: 2 s
    name, spans, killed = slice_of("low"), [], []

    def on_event(span):
        spans.append(span)
        if span.stage == "denoise_low" and span.kind == "compute" and not killed:
            killed.append(kill_host_process(cluster, name))

    async def make():
        return await PipelineDriver(spec).generate(spec.model.plan(request), id="lost", on_event=on_event)

    video = within(make())
    assert video.mp4.endswith(simulated_video(request))
    assert killed and not psutil.pid_exists(killed[0])
    images = [span for span in spans if span.stage == "encoder" and span.kind == "fetch"]
    assert len(images) == 2, "the image condition was gone when the slice was lost, and is encoded again"
    high = [span.step for span in spans if span.stage == "denoise_high" and span.kind == "compute"]
    assert len(high) == len(set(high)), "what the pool before has done is kept in a snapshot"


def test_an_object_lives_in_the_store_until_it_is_dropped(three_slices):
    connect(three_slices.address)
    base = _settled_mib()

    async def use():
        scope = RefStore().open_scope()
        first, second = [await scope.put(ray.put(np.full(20 << 20, i, np.uint8))) for i in range(2)]
        [there, none, also] = await scope.get(first, None, second)
        assert none is None and ((await there)[0], (await also)[0]) == (0, 1)
        del there, also
        assert _settled_mib(base + 40) == pytest.approx(base + 40, abs=1)
        scope.drop(first)
        assert _settled_mib(base + 20) == pytest.approx(base + 20, abs=1)
        with pytest.raises(InputLost, match="1 of 2"):
            await scope.get(first, second)
        scope.close()
        late = await scope.put(ray.put(np.zeros(20 << 20, np.uint8)))  # by a stage that was cancelled
        assert _settled_mib(base) == pytest.approx(base, abs=1)
        with pytest.raises(InputLost):
            await scope.get(late)

    within(use())
    leave()


def _settled_mib(expected=None):
    """What the stores hold, when Ray has told it: as much as is expected, or what it was before."""
    deadline, stored_mib = time.monotonic() + 60, math.inf
    while True:
        time.sleep(1.5)
        before, stored_mib = stored_mib, store_mib()
        if abs(stored_mib - (before if expected is None else expected)) < 1 or time.monotonic() > deadline:
            return stored_mib
