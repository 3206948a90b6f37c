"""Run by test_mesh.py in a process with eight virtual CPU devices: latents on several meshes, into an npz."""

import sys

import numpy as np
import pytest

from wan_tpu import GenerationRequest, MeshError, load_pipeline

folder, image, out = sys.argv[1:]
request = GenerationRequest(
    prompt="A cat looks into the camera",
    negative_prompt="ugly",
    image=image,
    height=64,
    width=128,
    frames=9,
    steps=3,
    guidance_scale=3.5,
    guidance_scale_2=1.0,  # the low-noise expert runs unguided: one branch over dp = 2
    shift=5.0,
)
latents = {}
for shape in [(1, 1, 1), (2, 1, 4), (1, 2, 4), (1, 1, 8), (2, 2, 2)]:
    pipe = load_pipeline(folder, dtype="float32", mesh=shape)
    resolved = pipe.resolve(request)
    state = pipe.denoise(resolved, pipe.encode(resolved), pipe.initial_state(resolved))
    latents["x".join(map(str, shape))] = state.latents
for mesh, expected in [((1, 1, 16), "16 devices"), ((1, 1, 3), "8 attention heads"), ((1, 0, 1), "positive")]:
    with pytest.raises(MeshError, match=expected):
        load_pipeline(folder, mesh=mesh)
default = load_pipeline(folder).runtime.mesh.shape
assert dict(default) == {"dp": 2, "sp": 1, "tp": 4}, default
np.savez(out, **latents)
