"""What one loss costs a request: one of its attempts."""

import asyncio
import dataclasses
import os
import signal

import pytest

from actors.pipeline.driver import PipelineDriver
from actors.pipeline.pools import deploy, shut_down
from cluster.connect import connect, leave
from cluster.emulation.cluster import EmulatedCluster, emulated_slices
from cluster.emulation.ray_nodes import processes
from cluster.inventory import slices_found
from scripts.simulation import soak
from scripts.simulation.simulated import Planned, simulated_video
from tests.conftest import PHOTO

pytestmark = pytest.mark.long

SECONDS = 120


def test_a_lost_host_and_its_payloads_cost_one_attempt(tmp_path, caplog):
    """The ends' node is lost while it decodes: the steps since the snapshot need what it had encoded."""
    plan = Planned(0.0, 0.0, 0.05, 6.0, text=(1, 512, 256), mp4_bytes=200_000).save(tmp_path / "slow.json")
    spec = soak.soak_spec(tmp_path)
    settings = dataclasses.replace(spec.settings, checkpoint=str(plan), attempts=2)
    spec = dataclasses.replace(spec, settings=settings)
    request = dataclasses.replace(soak.request(1, PHOTO), steps=8)
    with EmulatedCluster.start(emulated_slices(soak.LAYOUT), folder=tmp_path) as cluster:
        connect(cluster.address)
        deploy(spec)
        spans = []

        def ends_node():
            return next(s for s in slices_found() if (s.holder or "").startswith("ends/"))

        async def make():
            pipeline = PipelineDriver(spec)
            work = asyncio.create_task(pipeline.generate(request, id="one", on_event=spans.append))
            while not any(span.stage == "decoder" for span in spans):  # its inputs are there
                await asyncio.sleep(0.05)
                assert not work.done()
            found = await asyncio.to_thread(ends_node)
            victims = [p for p in processes(cluster.temp / f"{found.name}-0") if "HostActor" in p.name()]
            assert len(victims) == 1
            os.kill(victims[0].pid, signal.SIGKILL)
            await asyncio.to_thread(cluster.kill_host, found.name, 0)
            await asyncio.to_thread(cluster.add_host, found.name, 0)
            return await work

        try:
            video = asyncio.run(asyncio.wait_for(make(), SECONDS))
            assert video.mp4.startswith(simulated_video(request))
            losses = [record.message for record in caplog.records if "; attempt " in record.message]
            assert len(losses) == 1
            again = [span for span in spans if span.stage == "encoder" and span.what == "compute"]
            assert len(again) > 3, "what was encoded is lost with the node, and is encoded again"
        finally:
            shut_down(settings.name, drain_s=0)
            leave()
