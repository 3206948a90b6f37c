"""What the status says of replicas that compute with other things than their siblings."""

import time

from actors.observe.status_actor import ReplicaSeen, Seen
from actors.pipeline.status import pipeline_status, text
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from cluster.layout import Layout
from wan_tpu.families import preset_spec

LAYOUT = Layout.parse("pools: {all: {stages: [encoder, denoise, decoder], slice: v6e-8, replicas: 2}}", "mine")
SPEC = PipelineSpec(LAYOUT, PipelineSettings("model", "snapshots"), preset_spec("wan2.1-t2v-1.3b"), lasting=True)


def status_with(*software):
    replicas = {f"all/{i}": ReplicaSeen("all", "", "idle", "", (), time.time(), one) for i, one in enumerate(software)}
    return pipeline_status(SPEC, Seen(replicas=replicas), [], set(replicas))


def test_replicas_that_differ_are_named():
    found = status_with({"jax": "1", "XLA_FLAGS": "--fast"}, {"jax": "1", "XLA_FLAGS": ""})
    assert found.pools[0].differing == {"XLA_FLAGS": {"all/0": "--fast", "all/1": ""}}
    assert "not alike, so that their videos differ: XLA_FLAGS is --fast on all/0, nothing on all/1" in text(found)


def test_replicas_that_are_alike_are_not():
    found = status_with({"jax": "1"}, {"jax": "1"})
    assert not found.pools[0].differing and "not alike" not in text(found)
