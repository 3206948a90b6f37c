"""Figures that Ray's agents show to Prometheus: of a pipeline, a batch, and chips."""

import asyncio
import time
import urllib.request
from contextlib import suppress

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from actors.observe.meters import BatchMeters, ChipMeters
from actors.pipeline.driver import PipelineDriver
from actors.pipeline.pools import deploy, shut_down
from cluster.connect import connect, leave
from cluster.emulation import ray_nodes
from cluster.emulation.cluster import EmulatedCluster, list_emulated_slices
from scripts.simulation import measure, soak
from tests.conftest import PHOTO
from tests.waiting import wait_for
from wan_tpu import GenerationRequest

pytestmark = [pytest.mark.long, pytest.mark.thorough]


def figures():
    """What the agents of all nodes show: name -> labels that are ours, and value."""
    samples = {}
    for node in ray.nodes():
        with suppress(OSError):
            url = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"
            text = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10).read().decode()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name.startswith("ray_wan_"):
                        ours = {k: v for k, v in sample.labels.items() if k in OURS}
                        samples.setdefault(sample.name.removeprefix("ray_"), []).append((ours, sample.value))
    return samples


SHOWN = {
    "wan_replicas",
    "wan_start_seconds_total",
    "wan_requests_ended_total",
    "wan_batch_lines",
    "wan_batch_dollars_total",
    "wan_tpu_duty_cycle_percent",
}
OURS = ("pool", "activity", "phase", "outcome", "status", "stage", "stages", "chip")


def test_operators_see_starts_replicas_requests_batches_and_chips(tmp_path, monkeypatch, forks):
    monkeypatch.setitem(ray_nodes.ENVIRONMENT, "RAY_enable_metrics_collection", "1")
    monkeypatch.setitem(ray_nodes.ENVIRONMENT, "RAY_metrics_report_interval_ms", "1000")
    spec = soak.soak_spec(tmp_path, step_s=0.01)
    request = GenerationRequest(prompt="A cat", image=PHOTO, height=64, width=64, frames=9, steps=2, seed=1)
    with EmulatedCluster.start(list_emulated_slices(spec.layout), folder=tmp_path / "cluster", forks=forks) as cluster:
        connect(cluster.address)
        try:
            deploy(spec)

            async def make_videos():
                pipeline = PipelineDriver(spec)
                load, _ = await measure.run(pipeline, {str(i): request for i in range(3)}, in_flight=3)
                pipeline.close()
                return load

            load = asyncio.run(make_videos())
            batch = BatchMeters({"denoise_high": 8}, {"denoise_high": 2.7})
            for span in load.spans:
                batch.count_compute(span.stage, span.seconds)
            chips = ChipMeters(("encoder", "decoder"))

            def show_figures():
                batch.show_lines(["done", "done", "failed"], 5)
                chips.show({"duty_cycle_pct": ["12.50", "99.00"], "hbm_capacity_usage": ["1024", "2048"]})
                time.sleep(2.5)
                seen = figures()
                return seen if seen.keys() >= SHOWN else None

            seen = wait_for(show_figures, "the figures")
            shut_down(spec.settings.name)
        finally:
            leave()
    idle = {labels["pool"]: value for labels, value in seen["wan_replicas"] if labels["activity"] == "idle"}
    assert idle == {pool.name: pool.replicas.minimum for pool in spec.layout.pools}
    phases = {labels["phase"] for labels, _ in seen["wan_start_seconds_total"]}
    assert {labels["pool"] for labels, _ in seen["wan_start_seconds_total"]} == set(idle) and "read" in phases
    assert ({"outcome": "done"}, 3.0) in seen["wan_requests_ended_total"]
    lines = {labels["status"]: value for labels, value in seen["wan_batch_lines"]}
    assert lines == {"done": 2, "failed": 1, "invalid": 0, "changed": 0, "left": 2}
    used = sum(span.seconds for span in load.spans if span.stage == "denoise_high")
    [(_, dollars)] = seen["wan_batch_dollars_total"]
    assert dollars == pytest.approx(used * 8 * 2.7 / 3600, rel=0.01)
    duty = {labels["chip"]: value for labels, value in seen["wan_tpu_duty_cycle_percent"]}
    assert duty == {"0": 12.5, "1": 99.0}
