"""What is known of HunyuanVideo-1.5 models from their configuration, against diffusers' own pipelines."""

import json

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

from tests.conftest import PHOTO
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError, InvalidRequest
from wan_tpu.families.hunyuan15.published import PUBLISHED
from wan_tpu.families.hunyuan15.sizes import default_size
from wan_tpu.families.hunyuan15.small import make_checkpoint
from wan_tpu.families.hunyuan15.spec import HunyuanSpec
from wan_tpu.media.image import load_image
from wan_tpu.request import GenerationRequest

KINDS = list(PUBLISHED)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hunyuan15") / kind, kind)


# One of each task, size, guidance and kind of step.
COMPARED = ("480p-i2v", "720p-t2v", "480p-t2v-distilled", "480p-i2v-step-distilled")


@pytest.mark.parametrize(
    "kind",
    [kind if kind.endswith(COMPARED) else pytest.param(kind, marks=pytest.mark.thorough) for kind in KINDS],
    indirect=True,
)
def test_size_latents_timesteps_and_guidance_are_those_of_diffusers(folder):
    spec, theirs = HunyuanSpec.open(Checkpoint(folder)), diffusers.DiffusionPipeline.from_pretrained(folder)
    image = load_image(PHOTO) if "i2v" in spec.tasks else None
    request = spec.plan(GenerationRequest(prompt="a cat", image=image, frames=9, steps=3)).request
    schedule, seen = spec.schedule(request), []

    def look(module, args, kwargs):
        seen.append((float(kwargs["timestep"][0]), tuple(kwargs["hidden_states"].shape), kwargs.get("timestep_r")))

    theirs.transformer.register_forward_pre_hook(look, with_kwargs=True)
    latents = theirs(
        **({} if image is None else {"image": image}), prompt="a cat", num_frames=9, num_inference_steps=3,
        generator=torch.Generator().manual_seed(0), output_type="latent",
    ).frames  # fmt: skip
    branches = 2 if spec.experts(request)[0].guided else 1
    assert branches == (1 if spec.config.guidance == 1 else 2)
    assert theirs.guider.guidance_scale == schedule.guidance[0]
    np.testing.assert_allclose([timestep for timestep, _, _ in seen[::branches]], schedule.timesteps, rtol=1e-6, atol=0)
    assert len(seen) == 3 * branches
    assert latents.shape == spec.latent_shape(request)
    _, channels, *size = spec.latent_shape(request)
    assert {shape for _, shape, _ in seen} == {(1, 2 * channels + 1, *size)}
    assert (schedule.following is not None) == spec.config.meanflow
    if spec.config.meanflow:  # the next timestep, 0 after the last
        following = [float(timestep[0]) for _, _, timestep in seen]
        np.testing.assert_allclose(following, schedule.following, rtol=1e-6)
        assert schedule.following[-1] == 0


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


def test_a_size_that_is_asked_for_is_kept():
    spec, image = HunyuanSpec(PUBLISHED["hunyuanvideo1.5-480p-i2v"]), load_image(PHOTO)
    request = spec.plan(GenerationRequest(image=image, height=480, width=848)).request
    assert (request.height, request.width) == (480, 848)


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


def test_a_checkpoint_is_read_as_the_model_that_it_was_made_of(kind, folder):
    published, spec = HunyuanSpec(PUBLISHED[kind]), HunyuanSpec.open(Checkpoint(folder))
    assert (published.name, published.tasks) == (kind, ("t2v",) if "t2v" in kind else ("i2v",))
    assert (spec.name, spec.tasks) == ("a custom HunyuanVideo-1.5", published.tasks)
    for name in ("shift", "guidance_scale", "steps", "frames", "solver"):
        assert getattr(spec.defaults, name) == getattr(published.defaults, name)
    assert spec.stages == ("encoder", "denoise", "decoder")


@pytest.mark.parametrize(
    ("kind", "tokens"), [("hunyuanvideo1.5-720p-t2v", 111_600), ("hunyuanvideo1.5-480p-i2v", 49_290)]
)
def test_full_size(kind, tokens):
    spec = HunyuanSpec(PUBLISHED[kind])
    request = spec.plan(GenerationRequest(), image=kind.endswith("i2v")).request
    beside = 1985 if kind.endswith("i2v") else 1256
    assert spec.tokens(spec.latent_shape(request)) == tokens + beside


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"frames": 120}, r"frames.*\b120\b.*4n \+ 1\b.*\b121\b"),
        ({"solver": "unipc"}, "solver 'unipc'.*euler"),
        ({"guidance_scale_2": 3.0}, r"guidance_scale_2.*\b3\b.*hunyuanvideo1.5-480p-t2v"),
    ],
)
def test_what_a_model_does_not_make_is_refused_with_what_it_does(fields, message):
    with pytest.raises(InvalidRequest, match=message):
        HunyuanSpec(PUBLISHED["hunyuanvideo1.5-480p-t2v"]).plan(GenerationRequest(**fields))


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
