"""Run by test_turbo.py on four devices: latents on several meshes, into an npz."""

import sys

import numpy as np

from tests.wan_tpu.meshes import fit_meshes
from wan_tpu import GenerationRequest, load_pipeline

request = GenerationRequest(prompt="A cat", image=sys.argv[3], height=128, width=160, frames=17, seed=3)
latents, conditioning = {}, None
for mesh in fit_meshes((1, 1, 1), (1, 2, 2)):
    pipe = load_pipeline(sys.argv[1], dtype="float32", mesh=mesh)
    plan = pipe.plan(request)
    conditioning = conditioning or pipe.encode(plan)
    state = pipe.denoise(plan, conditioning, pipe.initial_state(plan))
    latents["x".join(map(str, mesh))] = state.latents
np.savez(sys.argv[2], **latents)
