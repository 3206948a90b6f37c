"""What `wan-tpu status` shows."""

import time

from actors.commands.status import MAX_LOST_SLICES, _select_shown
from actors.observe.status_actor import ReplicaStatus, ReportedStatus, RequestStatus
from actors.pipeline.status import MAX_SHOWN, build_status, describe_requests, format_status
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from cluster.inventory import LiveHost, LiveSlice
from cluster.layout import Layout
from cluster.slice_spec import SliceSpec
from wan_tpu.families import published_spec

LAYOUT = Layout.parse("pools: {all: {stages: [encoder, denoise, decoder], slice: v6e-8, replicas: 2}}", "mine")
SPEC = PipelineSpec(LAYOUT, PipelineSettings("model", "snapshots"), published_spec("wan2.1-t2v-1.3b"), lasting=True)


def status_with(*software):
    replicas = {
        f"all/{i}": ReplicaStatus("all", "", "idle", "", (), time.time(), versions)
        for i, versions in enumerate(software)
    }
    return build_status(SPEC, ReportedStatus(replicas=replicas), [], set(replicas))


def test_replicas_that_differ_are_named():
    status = status_with({"jax": "1", "XLA_FLAGS": "--fast"}, {"jax": "1", "XLA_FLAGS": ""})
    assert status.pools[0].differing == {"XLA_FLAGS": {"all/0": "--fast", "all/1": ""}}
    difference = "not alike, so that their videos differ: XLA_FLAGS is --fast on all/0, nothing on all/1"
    assert difference in format_status(status)


def test_replicas_that_are_alike_are_not():
    status = status_with({"jax": "1"}, {"jax": "1"})
    assert not status.pools[0].differing and "not alike" not in format_status(status)


def test_status_is_there_though_its_actor_is_silent():
    status = build_status(SPEC, None, [], {"all/0", "all/1"})
    assert status.silent and list(status.pools[0].replicas) == ["all/0", "all/1"]
    text = format_status(status)
    assert "unknown" in text


def test_many_replicas_and_requests_are_counted():
    replicas = {f"all/{i:03}": ReplicaStatus("all", "", "idle", "", (), time.time()) for i in range(250)}
    requests = {f"cat-{i}": RequestStatus(time.time(), "denoise", 1, 8) for i in range(50)}
    seen = ReportedStatus(replicas=replicas, requests=requests, unlisted={"denoise": 7, "waiting": 1000})
    status = build_status(SPEC, seen, [], set(replicas))
    assert (status.under_way, status.waiting, status.pools[0].queue) == (57, 1000, 57)
    text = format_status(status)
    assert len(text.splitlines()) < 2 * MAX_SHOWN + 10
    assert "    and 230 idle" in text and "57 under way, 1000 waiting" in text
    assert describe_requests(seen).startswith("cat-0 denoise 1/8 · cat-1 denoise 1/8 · ")
    assert describe_requests(seen).endswith(" · 51 more · 1000 waiting")


def test_request_is_listed_with_its_slice_and_why_that_was_chosen():
    chosen = "0 calls, others 2; holds the program"
    requests = {"cat": RequestStatus(time.time(), "denoise", 3, 8, "all/0", chosen)}
    text = format_status(build_status(SPEC, ReportedStatus(requests=requests), [], set()))
    [line] = [line for line in text.splitlines() if line.startswith("  cat")]
    assert line.split() == f"cat denoise step 3/8 37 % 0 s all/0: {chosen}".split()


def test_replica_whose_clock_is_ahead_was_not_seen_in_the_future():
    replicas = {"all/0": ReplicaStatus("all", "", "idle", "", (), time.time() + 100)}
    assert "idle, 0 s" in format_status(build_status(SPEC, ReportedStatus(replicas=replicas), [], set(replicas)))


def test_slices_that_are_gone_are_counted():
    spec, host = SliceSpec("v6e-1"), LiveHost(0, "node", "10.0.0.1", None)
    present = [LiveSlice(f"b-{i}", spec.pod_type, spec, (host,), None) for i in range(3)]
    absent = [LiveSlice(f"a-{i:03}", spec.pod_type, spec, (), None) for i in range(250)]
    selection, more = _select_shown(absent + present)
    assert [slice_.name for slice_ in selection] == [slice_.name for slice_ in absent[:MAX_LOST_SLICES] + present]
    assert more == 250 - MAX_LOST_SLICES
