"""Run by test_mesh.py in a process with sixteen virtual CPU devices: latents on several meshes, into an npz."""

import dataclasses
import functools
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from wan_tpu import GenerationRequest, MeshError, load_pipeline
from wan_tpu.ops.attention import attention, exchanged_attention
from wan_tpu.runtime.mesh import SHARDS, make_mesh
from wan_tpu.stages import encode_prompt

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
latents = {}
image = None
for shape in [(1, 1, 1), (2, 1, 4), (2, 2, 2), (1, 1, 16)]:
    pipe = load_pipeline(folder, dtype="float32", mesh=shape)
    resolved = pipe.resolve(request)
    if image is None:  # encoded once: test_halo compares the VAE's halves on meshes
        image = pipe.encode(resolved)
    text, negative = (
        encode_prompt(pipe.runtime, prompt, print) for prompt in pipe.runtime.model.spec.prompts(resolved)
    )
    conditioning = dataclasses.replace(image, prompt=text, negative=negative)
    state = pipe.denoise(resolved, conditioning, pipe.initial_state(resolved))
    latents["x".join(map(str, shape))] = state.latents
for mesh, expected in [((1, 1, 32), "32 devices"), ((1, 0, 1), "positive")]:
    with pytest.raises(MeshError, match=expected):
        load_pipeline(folder, mesh=mesh)
default = load_pipeline(folder).runtime.mesh.shape
assert dict(default) == {"dp": 2, "sp": 1, "tp": 8}, default
np.savez(out, **latents)

# 40 heads over 16 devices: 8 groups of heads, keys and values of the other half of the tokens gathered; 9 tokens are
# padding that must not count.
mesh = make_mesh((1, 1, 16), heads=40)
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2 * 8 * 3, 40 * 8)).astype(np.float32) for _ in range(3))
k[-9:], v[-9:] = 100, 1e6
grouped = [x.reshape(len(x), 8, -1).transpose(1, 0, 2) for x in (q, k, v)]
spread = jax.shard_map(
    functools.partial(exchanged_attention, heads=40, kv_len=len(k) - 9, token_axes=SHARDS, platform="cpu"),
    mesh=mesh,
    in_specs=(P(None, SHARDS),) * 3,
    out_specs=P(None, SHARDS),
    check_vma=False,
)
got = np.asarray(spread(*grouped)).transpose(1, 0, 2).reshape(q.shape)
np.testing.assert_allclose(got, attention(q, k, v, heads=40, platform="cpu", kv_len=len(k) - 9), atol=1e-5)
