"""What is known of HunyuanVideo-1.5 models from their configuration, against diffusers' own pipelines."""

import json

import diffusers
import pytest
import torch
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.hunyuan15.published import PUBLISHED
from wan_tpu.families.hunyuan15.sizes import default_size
from wan_tpu.families.hunyuan15.small import make_checkpoint
from wan_tpu.families.hunyuan15.spec import HunyuanSpec
from wan_tpu.request import GenerationRequest


@pytest.mark.parametrize("target", [640, 960])
@pytest.mark.parametrize(
    "image", [(720, 1280), (1280, 720), (1, 1), (1000, 999), (999, 1000), (4, 1), (1, 4), (333, 777), (10, 1), (1, 10)]
)
def test_a_size_of_the_image_s_shape_is_that_of_diffusers(image, target):
    processor = HunyuanVideo15ImageProcessor(do_resize=False)
    assert default_size(target, *image) == processor.calculate_default_height_width(*image, target)


def test_another_length_is_another_program_of_the_decoder():
    spec = HunyuanSpec(PUBLISHED["hunyuanvideo1.5-480p-t2v"])
    names = {spec.plan(GenerationRequest(frames=frames)).shapes["decoder"] for frames in (61, 121)}
    assert names == {"decoder 480x848x61", "decoder 480x848x121"}


@pytest.mark.parametrize(
    ("picture", "fields", "size"),
    [
        ((600, 400), {"height": 480}, (480, 320)),
        ((600, 400), {"width": 480}, (720, 480)),
        ((3, 1000), {"width": 480}, (16, 480)),
        (None, {"height": 480}, (480, 848)),
    ],
)
def test_of_one_side_the_other_has_the_image_s_shape(picture, fields, size):
    spec = HunyuanSpec(PUBLISHED["hunyuanvideo1.5-480p-i2v"])
    planned = spec.plan(GenerationRequest(**fields), image=True, picture=picture).request
    assert (planned.height, planned.width) == size


@pytest.mark.parametrize(("scale", "branches"), [(0.0, 2), (0.5, 2), (1.0, 1), (6.0, 2)])
def test_branches_of_a_scale_are_those_of_diffusers_guider(scale, branches):
    guider = diffusers.ClassifierFreeGuidance(guidance_scale=scale)
    guider.set_state(step=0, num_inference_steps=50, timestep=torch.tensor(1000))
    spec = HunyuanSpec(PUBLISHED["hunyuanvideo1.5-480p-t2v"])
    expert, *_ = spec.plan(GenerationRequest(guidance_scale=scale)).experts
    assert guider.num_conditions == branches == (2 if expert.guided else 1)


@pytest.mark.parametrize(
    ("kind", "tokens"), [("hunyuanvideo1.5-720p-t2v", 111_600), ("hunyuanvideo1.5-480p-i2v", 49_290)]
)
def test_full_size(kind, tokens):
    spec = HunyuanSpec(PUBLISHED[kind])
    request = spec.plan(GenerationRequest(), image=kind.endswith("i2v")).request
    beside = 1985 if kind.endswith("i2v") else 1256
    assert spec.tokens(spec.latent_shape(request)) == tokens + beside


@pytest.mark.parametrize(
    ("file", "changed", "message"),
    [
        ("guider/guider_config.json", {"guidance_rescale": 0.7}, "guider guidance_rescale 0.7.*0.0"),
        ("scheduler/scheduler_config.json", {"use_dynamic_shifting": True}, "use_dynamic_shifting True"),
        ("transformer/config.json", {"in_channels": 4}, r"\b4\b.*\b4\b.*\b9\b"),
        ("transformer/config.json", {"task_type": "v2v"}, "task_type 'v2v'.*t2v.*i2v"),
        ("vae/config.json", {"spatial_compression_ratio": 8}, r"spatial_compression_ratio 8\b.*\b16\b"),
        ("model_index.json", {"guider": ["diffusers", "SkipLayerGuidance"]}, "guider SkipLayerGuidance"),
    ],
)
def test_a_checkpoint_that_diffusers_would_run_otherwise_is_refused(file, changed, message, tmp_path):
    folder = make_checkpoint(tmp_path / "checkpoint", "hunyuanvideo1.5-480p-t2v")
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(CheckpointError, match=message):
        HunyuanSpec.open(Checkpoint(folder))
