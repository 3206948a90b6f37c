"""Run by test_mesh.py on eight or sixteen devices: latents on several meshes, into an npz."""

import dataclasses
import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from jax.sharding import PartitionSpec as P

from tests.wan_tpu import adapter_files
from tests.wan_tpu.meshes import fit_mesh, fit_meshes
from wan_tpu import GenerationRequest, MeshError, load_pipeline
from wan_tpu.ops import attention as attentions
from wan_tpu.ops.attention import attention, query_scale
from wan_tpu.ops.collectives import SplitWeight
from wan_tpu.ops.exchange import Projections, exchanged_attention, head_groups, key_parts
from wan_tpu.requested_adapter import parse_adapters
from wan_tpu.runtime.mesh import SHARDS, make_mesh
from wan_tpu.stages import encode_prompt
from wan_tpu.switches import set_switches
from wan_tpu_kernels.columns import Columns

folder, photo, out = sys.argv[1:]
request = GenerationRequest(
    prompt="A cat looks into the camera",
    negative_prompt="ugly",
    image=photo,
    height=48,
    width=80,  # 30 tokens: every split of them is padded
    frames=5,
    steps=3,
    guidance_scale=3.5,
    guidance_scale_2=1.0,  # the low-noise expert runs unguided: one branch over dp = 2
    shift=5.0,
)
# Every kind of change, on the rows of queries that are in pairs here, and on both sides of a split.
transformer = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer")
names = adapter_files.blocks(transformer, adapter_files.WAN)
factors = adapter_files.factors(transformer, names)
tensors = adapter_files.name_tensors(factors, names, "diffusion_model.", alpha=4)
tensors["diffusion_model.blocks.1.self_attn.q.diff_b"] = torch.arange(128.0)
tensors["diffusion_model.patch_embedding.diff"] = torch.ones_like(transformer.patch_embedding.weight)
adapter = adapter_files.save(tensors, f"{out}.safetensors")
# Skipped by both branches, and by one alone.
REUSED = ((False, False), (True, True), (False, False), (True, False))
merged = {}
reused = []
latents = {}
image = None
meshes = fit_meshes((1, 1, 1), (2, 2, 2), (1, 1, 16))
for shape in meshes:
    pipe = load_pipeline(folder, dtype="float32", mesh=shape)
    plan = pipe.plan(request)
    if image is None:  # encoded once: test_halo compares the VAE's halves on meshes
        image = pipe.encode(plan)
    text, negative = (encode_prompt(pipe.runtime, plan.describe_text(prompt), print) for prompt in plan.prompts)
    conditioning = dataclasses.replace(image, prompt=text, negative=negative)
    state = pipe.denoise(plan, conditioning, pipe.initial_state(plan))
    latents["x".join(map(str, shape))] = state.latents
    if shape in meshes[2:]:  # more devices than heads, which is all that it adds
        continue
    cached = pipe.plan(dataclasses.replace(request, cache="magcache:0.2,2,0", steps=4, guidance_scale_2=3.5))
    assert cached.skipped == REUSED
    reused.append(pipe.denoise(cached, conditioning, pipe.initial_state(cached)).latents)
    np.testing.assert_allclose(reused[-1], reused[0], atol=1e-4 * np.abs(reused[0]).max())
    base = pipe.runtime.component("denoise_high").params
    changed = pipe.runtime.component("denoise_high", parse_adapters([f"{adapter}:0.5"])).params
    assert {name for name in base if changed[name] is not base[name]} == {
        *(f"blocks.template.{name}.weight" for name in adapter_files.WAN),
        "blocks.template.attn1.to_q.bias",
        "patch_embedding.weight",
    }
    for name, value in changed.items():
        assert value.sharding == base[name].sharding, name
        merged.setdefault(name, np.asarray(value))
        np.testing.assert_allclose(np.asarray(value), merged[name], rtol=1e-6, atol=1e-6)
# In 8 bits: the same matrices wherever they lie, adapters applied, and logits as far from exact as those of one device.
eight, bits, scales = [], [], []
for shape in meshes[:2]:
    pipe = load_pipeline(folder, "int8-attention", shape)
    plan = pipe.plan(request)
    eight.append(pipe.denoise(plan, conditioning, pipe.initial_state(plan)).latents)
    base = pipe.runtime.component("denoise_high").params
    changed = pipe.runtime.component("denoise_high", parse_adapters([f"{adapter}:0.5"])).params
    assert all(value.sharding == base[name].sharding for name, value in changed.items())
    rounded = [name for name in changed if f"{name}_scale" in changed]
    assert len(rounded) == len(adapter_files.WAN)
    bits.append({name: np.asarray(changed[name]) for name in rounded})
    scales.append({name: np.asarray(changed[f"{name}_scale"]) for name in rounded})
spread = np.abs(eight[1] - eight[0]).max(), np.abs(eight[0] - latents["1x1x1"]).max()
assert spread[0] < 2 * spread[1] < 0.1 * np.abs(eight[0]).max(), spread
assert all((value == bits[0][name]).mean() > 0.999 for name, value in bits[1].items())
for name, value in scales[1].items():
    np.testing.assert_allclose(value, scales[0][name], rtol=1e-5)
for mesh, expected in [((1, 2, jax.device_count()), f"{2 * jax.device_count()} devices"), ((1, 0, 1), "positive")]:
    with pytest.raises(MeshError, match=expected):
        load_pipeline(folder, mesh=mesh)
default = load_pipeline(folder).runtime.mesh
assert default.size == jax.device_count() and default.shape["dp"] == 2, default
np.savez(out, **latents)

# 40 heads over 16 devices, or 20 over 8: half as many groups of heads as devices, keys and values of the other half of
# the tokens gathered; 9 tokens are padding that must not count.
all_heads = 5 * jax.device_count() // 2
mesh = make_mesh(fit_mesh((1, 1, 16)), heads=all_heads)
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2 * 8 * 3, all_heads * 8)).astype(np.float32) for _ in range(3))
k[-9:], v[-9:] = 100, 1e6


def spread_attention(mesh, q, k, v, *, heads, kv_len, platform="cpu", qk=None, last="key"):
    """Attention over tokens [L, N*D] that are spread over all devices; each projection picks a third of the columns."""
    groups, parts = head_groups(mesh, heads), key_parts(mesh, heads, q.shape[1] // heads)
    parts_of_queries, parts_of_keys = parts if last == "query" else (), parts
    # With queries last, there are four rounds, if heads allow it, and the second gathers a matrix.
    late = SplitWeight(jnp.ones((2, 16, 1)), jnp.int32(1), SHARDS, "cpu")
    to_gather = [{}, {"late": late}, {}, {}] if last == "query" else [{"late": jnp.arange(16.0).reshape(16, 1)}]

    def local(rows):
        def cut(index, parts=()):
            return lambda rows: Columns(q.shape[1], groups, parts).cut(jnp.split(rows, 3, axis=1)[index])

        mixed, _, gathered, _ = exchanged_attention(
            rows,
            Projections(query=cut(0, parts_of_queries), key=cut(1, parts_of_keys), value=cut(2), last=last),
            heads=heads,
            kv_len=kv_len,
            token_axes=SHARDS,
            platform=platform,
            to_gather=to_gather,
            qk=qk,
        )
        assert list(gathered) == ["late"]
        return jnp.concatenate(mixed, axis=-1)

    spread = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(SHARDS), out_specs=P(None, SHARDS), check_vma=False))
    got = np.asarray(spread(np.concatenate([q, k, v], axis=1)))
    return got.transpose(1, 0, 2).reshape(q.shape), parts


got, parts = spread_attention(mesh, q, k, v, heads=all_heads, kv_len=len(k) - 9)
assert parts == (all_heads // head_groups(mesh, all_heads) * 8,)  # too few columns for rounds
np.testing.assert_allclose(got, attention(q, k, v, heads=all_heads, platform="cpu", kv_len=len(k) - 9), atol=1e-5)
set_switches(collectives="synchronous")
synchronous, _ = spread_attention(mesh, q, k, v, heads=all_heads, kv_len=len(k) - 9)
set_switches(collectives="overlapped")
np.testing.assert_allclose(got, synchronous, atol=1e-6)


# In rounds, with the kernels of a TPU (elsewhere in Pallas' interpreter): three of one head, or of one register of
# narrow heads; a key far beyond the first makes one device's kernel overflow, and all repeat.
def check_rounds(shape, heads, width, late, last="key"):
    shape = fit_mesh(shape)
    mesh = make_mesh(shape, heads=heads, devices=jax.devices()[: math.prod(shape)])
    q, k, v = (rng.standard_normal((4 * 160, heads * width)).astype(np.float32) for _ in range(3))
    q *= np.float32(query_scale(width))
    k[-20, :width] = late * q[5, :width]
    expected = attention(q, k, v, heads=heads, platform="cpu", kv_len=len(k) - 9)
    for platform in ("cpu", "tpu") if late == 1 else ("tpu",):
        got, parts = spread_attention(mesh, q, k, v, heads=heads, kv_len=len(k) - 9, platform=platform, last=last)
        assert parts == (128, heads // shape[2] * width - 128)
        np.testing.assert_allclose(got, expected, atol=1e-4)
        if late == 1:
            few, _ = spread_attention(mesh, q, k, v, heads=heads, kv_len=len(k) - 9, platform=platform, qk="int8")
            cosine = (few * expected).sum() / np.linalg.norm(few) / np.linalg.norm(expected)
            assert 0.9995 < cosine < 1 - 1e-6, cosine


kernels = functools.partial(attentions.flash_attention_unchecked, interpret=jax.default_backend() != "tpu")
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(attentions, "flash_attention_unchecked", kernels)
    check_rounds((1, 1, 4), heads=12, width=128, late=1)
    check_rounds((1, 1, 4), heads=24, width=64, late=1)
    check_rounds((1, 1, 4), heads=8, width=128, late=1000)
    check_rounds((1, 1, 4), heads=16, width=128, late=1000, last="query")
    # Keys and values of the other half of the tokens are gathered. A CPU can do that only at once.
    set_switches(collectives="synchronous")
    check_rounds((1, 2, 2), heads=6, width=128, late=1000)
    check_rounds((1, 2, 2), heads=6, width=128, late=1000, last="query")
    set_switches(collectives="overlapped")
