"""What a pipeline on slices is compared with: the same request in one process, with the CPU devices of its hosts.

usage: reference_video.py CHECKPOINT REQUESTS.pickle OUTPUT.npz
"""

import pickle
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from wan_tpu import load_pipeline
from wan_tpu.data import Video

checkpoint, requests_file, output = sys.argv[1:]
request, *others = pickle.loads(Path(requests_file).read_bytes())
on_one_device = load_pipeline(checkpoint, "float32", (1, 1, 1))
plan = on_one_device.plan(request)
results = {}


def add(name, latents, video):
    with tempfile.TemporaryDirectory() as folder:
        mp4 = np.frombuffer(video.save(Path(folder) / "video.mp4").read_bytes(), np.uint8)
    results.update({f"latents_{name}": latents, f"pixels_{name}": video.pixels, f"mp4_{name}": mp4})


if len(jax.devices()) == 1:
    latents = []
    for i, each in enumerate([request, *others]):
        video = on_one_device.generate(each, on_step=lambda event: latents.append(event.latents))
        add(f"alone_{i}" if i else "alone", latents[-1], video)
else:
    # On the meshes of the layout: one device for each stage, and for the low-noise expert all.
    on_all = load_pipeline(checkpoint, "float32")
    results["mesh"] = str(on_all.runtime.mesh.shape)
    high, low = plan.experts
    conditioning = on_one_device.encode(plan)
    state = on_one_device.denoise(plan, conditioning, on_one_device.initial_state(plan), stop=high.stop)
    state = on_all.denoise(plan, conditioning, state)
    pixels = np.concatenate(list(on_one_device.decode(state.latents)))
    add("on_meshes", state.latents, Video(pixels, plan.request.fps))

np.savez(output, **results)
