"""HunyuanVideo-1.5's transformer on several devices."""

import numpy as np
import pytest

from tests.children import run_on_devices
from wan_tpu.families.hunyuan15.small import make_checkpoint

RNG = np.random.default_rng(0)


def draw_normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.meshes
@pytest.mark.thorough
def test_eight_devices_predict_what_one_does(tmp_path):
    """Latents, and two branches of other lengths."""
    folder = make_checkpoint(tmp_path / "checkpoint", "hunyuanvideo1.5-480p-i2v")
    latents, encodings = (
        draw_normal(1, 9, 3, 3, 5),
        {
            "text": draw_normal(2, 20, 32),
            "text_tokens": np.array([6, 20], np.int32),
            "glyphs": draw_normal(2, 7, 24),
            "glyph_tokens": np.array([7, 0], np.int32),
            "image": draw_normal(1, 9, 16),
        },
    )
    file, out = tmp_path / "inputs.npz", tmp_path / "predictions.npz"
    np.savez(file, latents=latents, **encodings)
    run_on_devices("tests.wan_tpu.hunyuan15_worker", folder, file, out, "float32,int8", count=8)
    predictions = np.load(out)
    assert len(predictions.files) == 2 * 2  # One device and several.
    for name in predictions.files:
        precision, _ = name.split()
        alone = predictions[f"{precision} 1x1x1"]
        # In 8 bits sums in another order round to other numbers of bfloat16, and those to others of int8.
        tolerance = {"float32": 1e-4, "int8": 0.02}[precision]
        assert np.abs(predictions[name] - alone).max() <= tolerance * np.abs(alone).max(), name
    far = np.abs(predictions["int8 1x1x1"] - predictions["float32 1x1x1"]).max()
    assert 1e-4 < far / np.abs(predictions["float32 1x1x1"]).max() < 0.05
