"""Requests on four pools, one on a slice of two hosts: the video of one process, and what goes wrong with one alone."""

import asyncio
import dataclasses
import itertools
import threading
import time
from collections import Counter
from pathlib import Path

import diffusers
import numpy as np
import psutil
import pytest
import torch
from ray import serve
from ray._private.ray_constants import KV_NAMESPACE_DASHBOARD
from ray.experimental.internal_kv import _internal_kv_list

from actors.cli import main
from actors.errors import PipelineError, PipelineStartFailed, RequestFailed
from actors.observe.status_actor import ReplicaStatus, StatusActor
from actors.pipeline import pools
from actors.pipeline.acquire import _find_owner, _hold_name
from actors.pipeline.client import PipelineClient
from actors.pipeline.driver import PipelineDriver
from actors.pipeline.pools import wait_until_up
from actors.pipeline_spec import PipelineSpec
from actors.reliability import ReliabilitySettings
from actors.slices.scheduler import MAX_PLACES
from actors.slices.snapshots import Snapshots, name_of
from cluster.emulation import ray_nodes
from cluster.layout import Layout
from tests.actors.on_slices.conftest import POISON, SHORT
from tests.actors.on_slices.running import SECONDS, kill, title
from tests.conftest import STAGES
from tests.waiting import wait_for
from tests.wan_tpu import adapter_files
from wan_tpu import load_pipeline
from wan_tpu.data import DenoiseState
from wan_tpu.families import open_spec
from wan_tpu.media.reading import read_frames

HIGH, ALL = 36, 100  # steps

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def first(running):
    """The request when nothing happens."""
    making = running.start("first", SHORT, fragments=True)
    making.video()
    return making


@pytest.fixture(scope="module")
def undisturbed_video(first):
    return first.video()


def test_the_video_is_that_of_one_process(reference, first):
    video = first.video()
    assert first.steps("denoise_high") == list(range(1, HIGH + 1))
    assert first.steps("denoise_low") == list(range(HIGH + 1, ALL + 1))
    assert {span.chips for span in first.spans} == {"emulated"}
    expected = reference()
    assert "2" in str(expected["mesh"])
    assert video == expected["mp4_on_meshes"].tobytes()  # bit for bit on the same meshes
    assert expected["pixels_on_meshes"].std() > 0.05


def test_fragments_are_the_video_that_others_have_without_them(running, first, tmp_path):
    joined, finished = tmp_path / "joined.mp4", tmp_path / "finished.mp4"
    joined.write_bytes(b"".join(fragment.content for fragment in first.fragments))
    without = running.start("without", SHORT)
    finished.write_bytes(without.video())
    assert (without.video(), without.fragments) == (first.video(), [])
    frames, expected = (np.stack(read_frames(path, SHORT.frames)) for path in (joined, finished))
    assert np.array_equal(frames, expected)
    assert [(fragment.run, fragment.index) for fragment in first.fragments] == [(0, 0)]  # of so few frames


def test_a_poisoned_request_fails_alone(running, undisturbed_video):
    poisoned = running.start("poisoned", dataclasses.replace(SHORT, prompt=f"a cat {POISON}"))
    after = running.start("after", SHORT)
    with pytest.raises(RequestFailed, match="encoder") as raised:
        poisoned.video()
    assert (type(raised.value), raised.value.code) == (RequestFailed, "unhealthy")
    assert after.video() == undisturbed_video
    assert not poisoned.steps("denoise_high")


def test_a_request_has_its_own_adapters_and_others_have_none(running, undisturbed_video, tmp_path):
    """On the slice of two hosts, too; one that can't be applied fails alone, and says which tensor it is."""
    source = running.pipeline.spec.settings.checkpoint
    transformer = diffusers.WanTransformer3DModel.from_pretrained(source, subfolder="transformer")
    names = adapter_files.blocks(transformer, adapter_files.WAN)
    tensors = adapter_files.name_tensors(adapter_files.factors(transformer, names), names, "diffusion_model.")
    path = adapter_files.save(tensors, tmp_path / "lora.safetensors")
    wrong = adapter_files.save(tensors | {"blocks.77.diff_m": torch.ones(3)}, tmp_path / "wrong.safetensors")
    adapted = dataclasses.replace(SHORT, loras=[f"{path}@high", f"{path}:-0.5@low"])
    requests = {"adapted": adapted, "plain": SHORT, "broken": dataclasses.replace(SHORT, loras=[wrong])}
    requests["absent"] = dataclasses.replace(SHORT, loras=["/nowhere.safetensors"])
    runs = {name: running.start(f"lora-{name}", request) for name, request in requests.items()}
    with pytest.raises(RequestFailed, match=r"blocks\.77\.diff_m") as raised:
        runs["broken"].video()
    assert raised.value.code == "invalid"
    with pytest.raises(RequestFailed, match=r"/nowhere\.safetensors"):
        runs["absent"].video()
    assert not runs["broken"].spans and not runs["absent"].spans  # Nothing was computed for them.
    assert runs["plain"].video() == undisturbed_video
    assert runs["adapted"].video() != undisturbed_video


def save_snapshot(running, id, step, latents):
    """Leave a snapshot as if the request had been here before; return its name."""
    settings = running.pipeline.spec.settings
    model = load_pipeline(settings.checkpoint, "float32", (1, 1, 1))
    plan = model.plan(SHORT)
    state = model.initial_state(plan)
    name = name_of(id, plan.request, f"{settings.checkpoint} {settings.dtype}")
    state = DenoiseState(latents(state.latents), tuple(map(np.zeros_like, state.history)), step)
    Snapshots(settings.snapshots).save(name, step, state)
    return name


def test_latents_that_are_nan_fail_their_request_on_both_hosts_and_no_other(running, undisturbed_video):
    save_snapshot(running, "nan", 50, lambda latents: latents * np.nan)
    nan = running.start("nan", SHORT)
    beside = running.start("beside", SHORT)
    with pytest.raises(RequestFailed, match=r"denoise_low.* 51 .*100") as raised:
        nan.video()
    assert raised.value.code == "unhealthy"
    assert beside.video() == undisturbed_video
    assert not Snapshots(running.pipeline.spec.settings.snapshots).list_names("nan")


def test_a_damaged_snapshot_is_deleted_and_not_used(running, undisturbed_video, settings):
    name = save_snapshot(running, "damaged", 50, lambda latents: latents)
    storage = Snapshots(settings.snapshots)._storage
    storage.write(f"{name}.0050.safetensors", storage.read(f"{name}.0050.safetensors")[:5000])
    making = running.start("damaged", SHORT)
    assert making.video() == undisturbed_video
    assert making.steps("denoise_low")[0] == HIGH + 1


def test_a_cancelled_request_leaves_the_slice_at_once_and_can_go_on_later(running, undisturbed_video, settings):
    long = dataclasses.replace(SHORT, steps=1000, seed=7)
    cancelled = running.start("again", long)
    waits = running.start("waits", SHORT)
    cancelled.wait_for("denoise_high", 50)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        cancelled.video()
    assert waits.video() == undisturbed_video
    assert len(cancelled.steps("denoise_high")) < 360  # not all that it has
    wait_for(lambda: not running.ask("high", "list_host_keys"), "the hosts have let go of its arrays")
    assert not running.ask("low", "list_host_keys")
    # The same id for another request doesn't go on from its states; for the same one it does.
    snapshots = Snapshots(settings.snapshots)
    before = set(snapshots.list_names("again"))
    assert before
    other = running.start("again", SHORT)
    other.wait_for("denoise_high", 30)
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        other.video()
    assert other.steps("denoise_high")[0] == 1
    wait_for(lambda: set(snapshots.list_names("again")) - before, "its snapshot")
    resumed = running.start("again", SHORT)
    assert resumed.video() == undisturbed_video
    # Snapshots are begun every twenty steps, and steps go on meanwhile, as many as the machine makes until it is told.
    assert all(step > 20 for step in resumed.steps("denoise_high"))
    assert not set(snapshots.list_names("again")) - before  # what the other one has left is its own


@pytest.mark.soak
def test_an_urgent_request_overtakes_between_two_steps_and_changes_no_bit(running, undisturbed_video):
    request = dataclasses.replace(SHORT, prompt="A dog runs", height=32, steps=20)  # of another shape
    expected = running.start("quiet", request).video()
    attempts = itertools.count()

    def start_both():
        """Start both requests; none where the long one ends while the urgent one is encoded, as on a busy machine."""
        attempt = next(attempts)
        long = running.start(f"long {attempt}", SHORT)
        long.wait_for("denoise_high", 5)
        urgent = running.start(f"urgent {attempt}", request, priority=3)
        assert urgent.video() == expected
        return None if long.future.done() else (long, urgent)

    long, urgent = wait_for(start_both, "an urgent request that comes in time")
    assert long.video() == undisturbed_video
    assert long.steps("denoise_high") == list(range(1, HIGH + 1))
    for pool in ("denoise_high", "denoise_low"):
        spans = [span for span in urgent.spans if span.stage == pool and span.step is not None]
        overtaken = [span for span in long.spans if span.stage == pool and span.step is not None]
        assert not [s for s in overtaken if s.end_s > spans[0].start_s and s.start_s < spans[-1].end_s]


def test_more_requests_than_fit_wait(running, spec):
    """A slice takes every call, and lets as many in as have room on its devices."""

    async def connect():
        return PipelineDriver(spec)

    other = asyncio.run_coroutine_threadsafe(connect(), running.loop).result(SECONDS)
    long = dataclasses.replace(SHORT, steps=1000)  # None of them ends by itself.
    first = running.start("one", long, other)
    first.wait_for("denoise_high", 1)
    twin = running.start("one", long, other)
    with pytest.raises(RequestFailed, match=r"\bone\b"):
        twin.video()
    others = [running.start(f"more-{i}", long, other) for i in range(3 * MAX_PLACES)]
    try:
        for making in others:
            making.wait_for("encoder")
        # Of one slice: the pool may have grown meanwhile, and the first ones may be with the next expert by now.
        keys = wait_for(lambda: running.ask("high", "list_host_keys"), "a request on a slice")
        assert len(keys) <= MAX_PLACES
    finally:
        for making in (first, *others):
            making.cancel()
    for making in (first, *others):
        with pytest.raises(asyncio.CancelledError):
            making.video()
    last = running.start("last", long, other)
    last.wait_for("denoise_high", 1)
    last.cancel()
    with pytest.raises(asyncio.CancelledError):
        last.video()
    other.close()


def test_storage_that_takes_no_snapshots_costs_no_request(running, undisturbed_video, settings):
    """Neither while a pool denoises nor where it hands over to the next."""
    making = running.start("uninsured", SHORT)
    making.wait_for("denoise_high", 1)
    folder = Path(settings.snapshots)
    aside = folder.rename(folder.with_name("aside"))
    folder.write_text("no folder")
    try:
        assert making.video() == undisturbed_video
    finally:
        folder.unlink()
        aside.rename(folder)
    Snapshots(settings.snapshots).delete_all_of("uninsured")


def test_a_status_actor_that_was_restarted_is_told_of_every_replica(running, spec):
    client, status = PipelineClient(spec), StatusActor.connect(spec.settings.name)
    asyncio.run(client.check_ready())
    other = dataclasses.replace(spec, settings=dataclasses.replace(spec.settings, snapshot_every=3))
    status.replace_spec(other)  # as a config that is applied to a running service does
    [process] = [process for process in running.processes() if "_StatusActor" in title(process)]
    kill(process)
    process.wait(10)

    def ready():
        try:
            asyncio.run(client.check_ready())
        except PipelineError:
            return False
        return True

    wait_for(ready, "the pipeline")
    wait_for(
        lambda: [bool(replica.software) for replica in status.read().replicas.values()] == [True] * 4,
        "what every replica computes with",
    )
    assert pools.find_spec(spec.settings.name).settings.snapshot_every == 3
    status.replace_spec(spec)


def test_a_slice_is_traced_while_it_computes(running, undisturbed_video, tmp_path, capsys):
    making = running.start("traced", SHORT)
    making.wait_for("denoise_low")  # on two hosts
    options = ["--address", running.cluster.address, "--output", str(tmp_path), "--seconds", "0.5"]
    assert main(["profile", "low", *options]) == 0
    assert making.video() == undisturbed_video
    [folder] = (tmp_path / "plugins" / "profile").iterdir()
    assert folder.name in capsys.readouterr().out
    traces = list(folder.glob("*.xplane.pb"))
    assert len(traces) == 2 and all(b"XLA" in trace.read_bytes() for trace in traces)
    assert main(["profile", "nothing", *options]) == 2
    assert "encoder, high, low, decoder" in capsys.readouterr().err
    assert main(["profile", "low", "--name", "wan-tpo", *options]) == 2
    assert "wan-tpu?" in capsys.readouterr().err


def test_ray_s_dashboard_finds_the_hosts_that_it_can_trace(running, profiler_port):
    listening = {
        connection.pid for connection in psutil.net_connections("tcp") if connection.laddr[1:] == (profiler_port,)
    }
    assert listening and listening <= {process.pid for process in running.all_hosts()}
    keys = _internal_kv_list("jax_profiler_port:", namespace=KV_NAMESPACE_DASHBOARD)  # of hosts that were killed, too
    assert listening <= {int(key.decode().rpartition(":")[2]) for key in keys}


def test_requests_survive_their_killed_replica(running, undisturbed_video):
    [leader], host = running.leaders("high"), running.host("high")
    snapshots = Snapshots(running.pipeline.spec.settings.snapshots)
    making, beside = running.start("replica", SHORT), running.start("beside", SHORT)
    # It is seen sooner than the request's steps, which come through Serve.
    wait_for(lambda: snapshots.list_names("replica"), "a snapshot")
    kill(leader)
    for request in (making, beside):
        assert request.video() == undisturbed_video
        ran = Counter(request.steps("denoise_high") + request.steps("denoise_low"))
        assert sum(times - 1 for times in ran.values()) <= 40  # Twice as many as from snapshot to snapshot.
    assert not host.is_running()


def test_a_pool_that_waits_for_its_slice_is_taken_down_at_once(running, settings):
    layout = Layout.parse(f"pools:\n  all:\n    stages: [{', '.join(STAGES)}]\n    slice: v6e-16\n", "tests")
    settings = dataclasses.replace(settings, name="late", reliability=ReliabilitySettings())
    spec = PipelineSpec(layout, settings, open_spec(settings.checkpoint), lasting=False)
    messages, ended = [], []

    def start():
        with pytest.raises(PipelineStartFailed, match="pool all"):
            pools.deploy(spec, on_status=messages.append)
        ended.append(True)

    threading.Thread(target=start).start()
    wait_for(lambda: any("waits for a free v6e-16" in text for text in messages), "a leader that waits")
    for name in pools.list_applications("late"):
        serve.delete(name)
    wait_for(lambda: ended and not pools.list_live_replicas("late", layout), "nothing is left")


def test_a_replica_that_was_refused_long_ago_stops_no_batch(running, spec):
    status = StatusActor.connect(spec.settings.name)
    refused = ReplicaStatus("low", "", "refused", "the checkpoint was damaged then", (), time.time())
    status.report_replica("low/old", refused)
    wait_until_up(spec, print)
    status.report_gone("low/old")


@pytest.mark.thorough
def test_a_batch_s_pipeline_stays_its_own_when_the_node_of_its_mark_is_lost(running):
    with _hold_name("batch"):
        [process] = [process for process in running.processes() if "_Owner" in title(process)]
        assert process in ray_nodes.processes(running.cluster.temp / "head")  # not on a host, which may be taken away
        kill(process)
        assert "Ray job" in (_find_owner("batch") or "")
    assert _find_owner("batch") is None
