"""Whole videos on eight devices: every stage, and what passes between them."""

import json

import jax
import numpy as np
import pytest

from tests.children import run_on_devices
from tests.conftest import PHOTO

FIELDS = {"prompt": "A cat plays the piano.", "image": str(PHOTO), "seed": 3, "height": 64}
REQUESTS = {
    "both images": ("minimax-h3", FIELDS | {"last_image": str(PHOTO), "width": 96, "steps": 2}),
    "two stages": ("ltx-2.3-distilled", FIELDS | {"width": 128, "frames": 9}),
    "chunks of two frames": ("cogvideox1.5-5b-i2v", FIELDS | {"width": 96, "frames": 17, "steps": 2}),
    "a quote": (
        "hunyuanvideo1.5-480p-i2v",
        FIELDS | {"prompt": 'A "sign"', "width": 96, "frames": 9, "steps": 2},
    ),
    "a history": ("helios-distilled", FIELDS | {"image": None, "width": 64, "frames": 66, "steps": 6}),
    # Fewer tokens, and fewer latents of the sound, than devices.
    "one frame": ("ltx-2.5-distilled", FIELDS | {"image": None, "width": 64, "frames": 1}),
}
# Relative to the largest value: float32 sums in another order, over all steps and through the decoders.
TOLERANCES = {"latents": 1e-4, "sound": 1e-4, "pixels": 2e-3, "samples": 2e-3}


@pytest.mark.meshes
@pytest.mark.thorough
@pytest.mark.parametrize("name", REQUESTS)
def test_eight_devices_make_the_video_that_one_makes(name, checkpoint, tmp_path):
    (kind, fields), out = REQUESTS[name], tmp_path / "videos.npz"
    run_on_devices("tests.wan_tpu.whole_run_worker", checkpoint(kind), json.dumps(fields), out, count=8)
    parts = dict(np.load(out))
    meshes = {name.partition(" ")[0] for name in parts}
    assert len(meshes) == 2 or jax.device_count() > 1
    for name, value in parts.items():
        part = name.partition(" ")[2]
        expected = parts[f"1x1x1 {part}"]
        error = np.abs(value - expected).max() / np.abs(expected).max()
        assert value.std() > 1e-3 and error <= TOLERANCES[part.partition(" ")[0]], (name, error)
