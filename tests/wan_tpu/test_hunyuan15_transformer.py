"""HunyuanVideo-1.5's transformer, against diffusers' module."""

import diffusers
import numpy as np
import pytest
import torch

from tests.children import run_on_devices
from tests.wan_tpu import hunyuan15_worker
from wan_tpu.families.hunyuan15.small import make_checkpoint
from wan_tpu.runtime.mesh import make_mesh

TEXT, GLYPHS, IMAGE = 20, 7, 9
RNG = np.random.default_rng(0)


def draw_normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


KINDS = ["hunyuanvideo1.5-480p-i2v", "hunyuanvideo1.5-480p-i2v-step-distilled"]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hunyuan15") / request.param, request.param)


def inputs():
    """Latents, and two branches of other lengths."""
    return draw_normal(1, 9, 3, 3, 5), {
        "text": draw_normal(2, TEXT, 32),
        "text_tokens": np.array([6, 20], np.int32),
        "glyphs": draw_normal(2, GLYPHS, 24),
        "glyph_tokens": np.array([7, 0], np.int32),
        "image": draw_normal(1, IMAGE, 16),
    }


def test_each_branch_is_predicted_as_diffusers_does(folder):
    latents, encodings = inputs()
    model = diffusers.HunyuanVideo15Transformer3DModel.from_pretrained(folder / "transformer").eval()
    predictions = hunyuan15_worker.predict(folder, make_mesh((1, 1, 1), heads=4), latents, encodings)
    for branch in range(2):
        parts = {name: torch.from_numpy(encodings[name][branch : branch + 1]) for name in ("text", "glyphs")}
        counts = {name: int(encodings[name][branch]) for name in ("text_tokens", "glyph_tokens")}
        with torch.no_grad():
            expected = model(
                torch.from_numpy(latents),
                torch.tensor([hunyuan15_worker.TIMESTEP]),
                parts["text"],
                (torch.arange(TEXT) < counts["text_tokens"])[None].float(),
                torch.tensor([hunyuan15_worker.FOLLOWING]) if model.config.use_meanflow else None,
                parts["glyphs"],
                (torch.arange(GLYPHS) < counts["glyph_tokens"])[None].float(),
                torch.from_numpy(encodings["image"]),
            ).sample[0].numpy()  # fmt: skip
        assert np.abs(predictions[branch] - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.meshes
@pytest.mark.thorough
@pytest.mark.parametrize("folder", KINDS[:1], indirect=True)
def test_eight_devices_predict_what_one_does(folder, tmp_path):
    latents, encodings = inputs()
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
