"""Denoises a video of MiniMax-H3 with references. test_minimax_h3_references.py runs it on eight devices.

Arguments: a checkpoint's folder, a request's fields as JSON, and where to write the latents.
"""

import json
import sys
from pathlib import Path

import numpy as np

from tests.wan_tpu.meshes import fit_meshes
from wan_tpu import GenerationRequest, load_pipeline


def denoise(pipe, request):
    """Return the latents of video and sound after the last step, by name."""
    plan = pipe.plan(request)
    state = pipe.denoise(plan, pipe.encode(plan), pipe.initial_state(plan))
    return {"video": np.asarray(state.latents), "sound": np.asarray(state.audio)}


if __name__ == "__main__":
    folder, fields, out = sys.argv[1:]
    request, results = GenerationRequest(**json.loads(fields)), {}
    for shape in fit_meshes((1, 2, 4)):
        latents = denoise(load_pipeline(folder, "float32", shape, keep_weights=False), request)
        results |= {f"{'x'.join(map(str, shape))} {name}": array for name, array in latents.items()}
    np.savez(Path(out), **results)
