"""Run by test_two_hosts.py, once for each host of a slice: a whole request through `StageHost`, piece by piece.

Arguments: rank, hosts, port, checkpoint, image, folder for results. Writes <rank>.npz, and a failure ends it.
"""

import dataclasses
import itertools
import os
import pickle
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors
from diffusers import WanTransformer3DModel
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from actors.slices.payloads import pack, unpack
from actors.slices.prepared import OutOfOrder
from actors.slices.stage_host import StageHost
from tests.wan_tpu import adapter_files
from wan_tpu import GenerationRequest, InvalidRequest, MeshError, OutputError, UnhealthyResult
from wan_tpu.data import DenoiseState, Video
from wan_tpu.errors import Unavailable
from wan_tpu.families.shared.tokens import half_split
from wan_tpu.pipeline import Pipeline
from wan_tpu.plan import PromptText
from wan_tpu.progress import Silent
from wan_tpu.runtime.components import load_component
from wan_tpu.runtime.mesh import AXES, make_mesh

rank, hosts, port = map(int, sys.argv[1:4])
checkpoint, image, folder = sys.argv[4:]
MESH = (2, 1, 2)
if hosts > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", hosts, rank)
    # Gloo waits 30 s for the other host at the first collective of each group of devices. Both are here at this moment,
    # but on a busy machine they compile the real programs at times that lie further apart.
    groups = [axes for count in (1, 2, 3) for axes in itertools.combinations(AXES, count)]
    for axes in groups:
        add = jax.shard_map(
            partial(jax.lax.psum, axis_name=axes),
            mesh=make_mesh(MESH, heads=2),
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        )
        jax.block_until_ready(jax.jit(add)(np.ones(1, np.float32)))
assert len(jax.devices()) == 4

ALL = ("encoder", "denoise_high", "denoise_low", "decoder")
request = GenerationRequest(
    prompt="A cat looks into the camera",
    negative_prompt="ugly",
    image=image,
    height=64,
    width=96,
    frames=9,
    steps=4,
    guidance_scale=3.5,
    guidance_scale_2=2.5,
    shift=5.0,
)


def share_payload(name, payload):
    """Return rank 0's payload on every host; the object store does this, here it is a file."""
    assert (payload is None) == (rank > 0), "only the first host copies results out"
    file = Path(folder) / f"{name}.payload"
    if rank == 0:
        file.with_suffix(".partial").write_bytes(pickle.dumps(payload))
        file.with_suffix(".partial").rename(file)
    deadline = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} doesn't come"
        time.sleep(0.01)
    return pickle.loads(file.read_bytes())


def begin_and_step(key, snapshots=None):
    """Run an expert's steps."""
    host.begin(key)
    expert = plan.expert_at(host_step(key))
    for _ in range(host_step(key), expert.stop):
        _, done = host.step(key)
        if snapshots is not None:
            snapshots[done] = host.snapshot(key)
    return expert


def host_step(key):
    return host.snapshot(key).value


reports = []
host = StageHost(checkpoint, ALL, MESH, "float32", report=reports.append)
runtime, pipe = host._runtime, Pipeline(host._runtime, Silent())
if hosts > 1:
    with pytest.raises(MeshError, match=r"1 .*2 "):
        StageHost(checkpoint, ALL, (1, 1, 2), "float32")
if hosts == 1:  # what several are compared with: the one-machine pipeline alone
    latents = []
    got = pipe.generate(request, on_step=lambda event: latents.append(event.latents))
    file = Video(got.pixels, host._spec.plan(request).request.fps).save(Path(folder) / "alone.mp4")
    np.savez(Path(folder) / f"{rank}.npz", latents=latents[-1], pixels=got.pixels, mp4=np.fromfile(file, np.uint8))
    sys.exit()

host.load()
last = {report.item: report for report in reports}  # bytes of each component
assert list(last) == [f"read {name}" for name in host._components]
assert all(0 < report.done == report.total and report.unit == "B" for report in last.values()), last
plan = host._spec.plan(request)
later = plan.without_image()
assert [expert.stage for expert in plan.experts] == ["denoise_high", "denoise_low"]
host.warm_up(request)
compiled = {name: len(program._compiled) for name, program in runtime.programs.items()}

# ---- the whole request
texts = [
    share_payload(f"text{i}", host.encode_text(PromptText(prompt)).payload) for i, prompt in enumerate(plan.prompts)
]
host.prepare_encode("a", plan.request)
condition = share_payload("image", host.encode_image("a").payload)
host.prepare_denoise("a", later, *texts, condition)
snapshots = {}
assert begin_and_step("a", snapshots).stop == plan.experts[1].start
beside = threading.Thread(target=host.prepare_denoise, args=("b", later, *texts, condition), daemon=True)
beside.start()  # the next request's inputs come while this one computes
begin_and_step("a", snapshots)
beside.join()
state = share_payload("state", host.collect("a").payload)
assert (state.step, len(state.arrays)) == (4, 1)
host.prepare_decode("a", later.request, state, fragments=True)
fragments = []


def take_fragments():
    may_follow = True
    while may_follow:
        new, may_follow = host.take_fragments("a")
        fragments.extend(new)


taking = threading.Thread(target=take_fragments, daemon=True)
taking.start()  # in a lane of its own
video = share_payload("video", host.decode("a").payload)
taking.join()
assert bytes(unpack(video).mp4[4:8]) == b"ftyp"
assert len(fragments) == (rank == 0)  # of so few frames
assert host.list_keys() == ["b"]
now = {name: len(program._compiled) for name, program in runtime.programs.items()}
assert now == compiled, f"warm_up missed some: {compiled}, {now}"

# ---- the same on the one-machine pipeline
latents = []
got = pipe.generate(request, on_step=lambda event: latents.append(event.latents))
assert np.array_equal(unpack(state).latents, latents[-1])
np.savez(Path(folder) / f"{rank}.npz", latents=latents[-1], pixels=got.pixels, mp4=unpack(video).mp4)
# ---- each host reads the weights of its own devices: half of each matrix, in quarters
params = load_component(
    runtime.model.checkpoint, runtime.model.components["denoise_high"], "float32", make_mesh((1, 2, 2), heads=2)
).params
with safetensors.safe_open(next(Path(checkpoint, "transformer").glob("*.safetensors")), "numpy") as file:
    for part, change in (("ffn.net.0.proj.weight", lambda x: x), ("attn1.to_q.weight", lambda x: half_split(2, x))):
        weight = params[f"blocks.template.{part}"]
        stored = np.stack([change(file.get_tensor(f"blocks.{i}.{part}")) for i in range(weight.shape[0])])
        assert sum(shard.data.size for shard in weight.addressable_shards) == stored.size // 2
        for shard in weight.addressable_shards:
            assert np.array_equal(shard.data, stored[shard.index])

# ---- resumed from a snapshot, on either side of the boundary
for step in (1, 3):
    host.prepare_denoise("c", later, *texts, condition, share_payload(f"snapshot{step}", snapshots[step].payload))
    while host_step("c") < 4:
        begin_and_step("c")
    resumed = host.collect("c").payload
    assert rank > 0 or np.array_equal(resumed.arrays["latents"], state.arrays["latents"]), step

# ---- what fails, fails on every host and leaves it usable
with pytest.raises(OutOfOrder, match=r"\bbegin\b"):
    host.step("b")
with pytest.raises(OutOfOrder, match=r"step 4\b"):
    host.prepare_decode("d", dataclasses.replace(later.request, steps=5), state)
with pytest.raises(OutOfOrder, match=r"TextEmbedding.*DenoiseState"):
    host.prepare_decode("d", later.request, texts[0])
poison = unpack(share_payload("poison", snapshots[1].payload))
latents = poison.latents.copy()
latents[0, 0, 0, 0, 0] = np.nan
host.prepare_denoise("d", later, *texts, condition, pack(dataclasses.replace(poison, latents=latents)))
host.prepare_denoise("e", later, *texts, condition, share_payload("snapshot1", snapshots[1].payload))
host.begin("d")
host.begin("e")
with pytest.raises(UnhealthyResult, match=r"denoise_high.* 2 .*4"):
    host.step("d")
host.drop("d")
begin_and_step("e")
host.drop("e")
broken = pack(DenoiseState(np.full_like(unpack(state).latents, np.inf), (), 4))
host.prepare_decode("d", later.request, broken)
with pytest.raises(UnhealthyResult, match=r"decoder.* 1 .*3"):
    host.decode("d")
host.prepare_decode("d", later.request, state)
usual_folder, tempfile.tempdir = tempfile.tempdir, "/proc/nothing" if rank == 0 else None  # one host's disk is gone
with pytest.raises(OutputError):
    host.decode("d")
tempfile.tempdir = usual_folder

# ---- requests with adapters, between those without: each has its own weights again
own = Path(folder) / f"adapter{rank}.safetensors"
transformer = WanTransformer3DModel.from_pretrained(checkpoint, subfolder="transformer")
names = adapter_files.blocks(transformer, adapter_files.WAN)
tensors = adapter_files.name_tensors(adapter_files.factors(transformer, names), names, "diffusion_model.")
adapter_files.save(tensors, own)
path = share_payload("adapter", str(own) if rank == 0 else None)
adapted = host._spec.plan(dataclasses.replace(request, loras=[f"{path}@high", f"{path}:0.5@low"])).without_image()
host.fetch_adapters(adapted)
multihost_utils.sync_global_devices("fetched")
if rank == 0:
    own.rename(own.with_suffix(".aside"))  # nobody looks at the file again
multihost_utils.sync_global_devices("moved")
host.prepare_denoise("f", adapted, *texts, condition)
host.begin("f")
host.step("f")
begin_and_step("b")
begin_and_step("f")
begin_and_step("f")
changed = share_payload("changed", host.collect("f").payload)
if rank == 0:
    own.with_suffix(".aside").rename(own)
multihost_utils.sync_global_devices("moved back")
expected = []
pipe.generate(dataclasses.replace(request, loras=adapted.request.loras), on_step=lambda e: expected.append(e.latents))
assert np.array_equal(unpack(changed).latents, expected[-1])
assert np.abs(expected[-1] - unpack(state).latents).max() > 0.01
wrong = host._spec.plan(dataclasses.replace(request, loras=["/nowhere.safetensors"])).without_image()
with pytest.raises(InvalidRequest, match=r"/nowhere\.safetensors"):
    host.fetch_adapters(wrong)
with pytest.raises(Unavailable, match="fetch_adapters"):
    host.prepare_denoise("g", wrong, *texts, condition)

# ---- hosts that find different files by one path compute nothing, and can go on
other = Path(folder) / f"host{rank}"
other.mkdir()
os.chdir(other)
with_adapter = host._spec.plan(dataclasses.replace(request, loras=["/proc/self/cwd/a.safetensors"])).without_image()
for seed in (rank, 5):
    factors = adapter_files.factors(transformer, names, seed=seed)
    adapter_files.save(adapter_files.name_tensors(factors, names, "diffusion_model."), other / "a.safetensors")
    host.fetch_adapters(with_adapter)
    host.prepare_denoise("g", with_adapter, *texts, condition)
    if seed == rank:
        with pytest.raises(Unavailable, match=r"/proc/self/cwd/a\.safetensors"):
            host.begin("g")
    else:
        host.begin("g")
    host.drop("g")
begin_and_step("b")
again = host.collect("b").payload
assert rank > 0 or np.array_equal(again.arrays["latents"], state.arrays["latents"])
