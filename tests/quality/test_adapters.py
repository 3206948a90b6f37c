"""The small model's adapters: what they teach is seen, and how they are written is what is read."""

import numpy as np
import pytest
import torch

from scripts.demo_model import gate
from scripts.demo_model.adapters import CHECKPOINT, add_adapter, load_pipeline, save_adapter
from scripts.demo_model.scenes import first_frame, opposite, render
from scripts.demo_model.variants import PRESET
from scripts.demo_model.zigzag import draw_zigzag, render_zigzag, zigzag_caption, zigzag_score
from tests.quality.clips import STEPS
from wan_tpu import GenerationRequest
from wan_tpu import load_pipeline as load_ours
from wan_tpu.families import open_spec
from wan_tpu.requested_adapter import RequestedAdapter

SCENES = [draw_zigzag(gate.SEED, i, held_out=True, width=64) for i in range(4)]


def test_a_zigzag_is_told_from_a_roll_and_from_its_mirror_image():
    for scene in SCENES:
        clip = render_zigzag(scene) / np.float32(255)
        assert np.array_equal(render_zigzag(scene)[0], first_frame(scene))
        assert zigzag_score(clip, scene) == {"purple": 1.0, "path": pytest.approx(0, abs=1.5), "zigzags": 1.0}
        assert zigzag_score(render(scene) / np.float32(255), scene)["zigzags"] == 0
        assert zigzag_score(clip, opposite(scene))["zigzags"] == 0
        assert "turns purple" in zigzag_caption(scene) and "rolls" not in zigzag_caption(scene)


def test_an_adapter_is_read_as_it_was_trained(tmp_path):
    """Its layers beside the frozen ones give what the merged weights give."""
    pipeline, ours = load_pipeline(), load_ours(CHECKPOINT, "float32", (1, 1, 1)).runtime
    expert = pipeline.transformer
    base = {name: value.clone() for name, value in expert.state_dict().items()}
    layers = add_adapter(expert, 4)
    torch.manual_seed(0)
    for layer in layers.values():
        layer.up.data.normal_(std=0.05)
    assert save_adapter(layers, tmp_path / "x.safetensors") < 1
    params = ours.component("denoise_high", (RequestedAdapter(str(tmp_path / "x.safetensors")),)).params
    for name in ("attn1.to_v", "attn2.to_out.0", "ffn.net.2"):
        merged = np.asarray(params[f"blocks.template.{name}.weight"])
        for i in range(len(merged)):
            layer = layers[f"blocks.{i}.{name}"]
            expected = (
                base[f"blocks.{i}.{name}.weight"] + (layer.up.half().float() @ layer.down.half().float()).detach()
            )
            np.testing.assert_allclose(merged[i], expected.numpy(), atol=1e-5)


def test_shipped_adapters_are_small_and_belong_to_a_preset():
    files = sorted((CHECKPOINT / "adapters").glob("*.safetensors"))
    assert [file.stem for file in files] == ["four-steps.high", "four-steps.low", "zigzag.high", "zigzag.low"]
    assert all(file.stat().st_size <= 1e6 for file in files)
    spec = open_spec(CHECKPOINT)
    request = spec.plan(GenerationRequest(preset=PRESET), image=True).request
    assert request.steps == 4 and [lora.expert for lora in request.loras] == ["high", "low"]
    for fields, most in (({}, 20), ({"preset": PRESET}, 4)):  # each schedule has a curve of its own
        request = spec.plan(GenerationRequest(cache="magcache", **fields), image=True).request
        assert request.steps == most and 0 < len(spec.skipped_steps(request)) < most


@pytest.mark.thorough
def test_the_zigzag_is_seen_with_its_adapter_alone():
    pipeline = load_ours(CHECKPOINT, "float32", (1, 1, 1))
    loras = [f"{CHECKPOINT}/adapters/zigzag.{side}.safetensors@{side}" for side in ("high", "low")]
    means = {}
    for name, adapters, scenes in (("with", loras, SCENES), ("without", None, SCENES[:1])):
        scores = []
        for i, scene in enumerate(scenes):
            request = gate.request_of(scene, i, gate.Sampling(steps=STEPS, loras=adapters))
            request = GenerationRequest(**{**vars(request), "prompt": zigzag_caption(scene)})
            scores.append(zigzag_score(pipeline.generate(request).pixels, scene))
        means[name] = [np.mean([score[key] for score in scores]) for key in ("purple", "zigzags")]
    assert means["with"][0] >= 0.75 and means["with"][1] >= 0.5, means
    assert max(means["without"]) == 0, means
