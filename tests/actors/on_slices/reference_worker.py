"""What the pipeline on slices is compared with: the same request in one process, with the CPU devices of two hosts.

usage: reference_worker.py CHECKPOINT REQUEST.pickle OUTPUT.npz
"""

import pickle
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from wan_tpu import load_pipeline
from wan_tpu.data import Video

checkpoint, asked, output = sys.argv[1:]
assert len(jax.devices()) == 2
request = pickle.loads(Path(asked).read_bytes())
one = load_pipeline(checkpoint, "float32", (1, 1, 1))


def made(pixels):
    with tempfile.TemporaryDirectory() as folder:
        return np.frombuffer(Video(pixels, request.fps or 16).save(Path(folder) / "video.mp4").read_bytes(), np.uint8)


# On the meshes of the layout: one device for each stage, and for the low-noise expert both.
two = load_pipeline(checkpoint, "float32")
resolved = one.resolve(request)
high, low = one.experts(resolved)
conditioning = one.encode(resolved)
state = one.denoise(resolved, conditioning, one.initial_state(resolved), stop=high.stop)
state = two.denoise(resolved, conditioning, state)
pixels = np.concatenate(list(one.decode(state.latents)))

# On one device.
latents = []
alone = one.generate(request, on_step=lambda event: latents.append(event.latents))
np.savez(
    output,
    mp4=made(pixels),
    latents=state.latents,
    pixels=pixels,
    latents_alone=latents[-1],
    pixels_alone=alone.pixels,
    mesh=str(two.runtime.mesh.shape),
)
