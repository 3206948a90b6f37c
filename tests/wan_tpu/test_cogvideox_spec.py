"""What is known of CogVideoX models from their configuration, against diffusers' own pipelines."""

import diffusers
import numpy as np
import pytest
import torch

from tests.conftest import PHOTO
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError, InvalidRequest
from wan_tpu.families.cogvideox.published import PUBLISHED
from wan_tpu.families.cogvideox.small import make_checkpoint
from wan_tpu.families.cogvideox.spec import CogVideoXSpec
from wan_tpu.media.image import load_image
from wan_tpu.request import GenerationRequest

SIZE = {"height": 64, "width": 96, "frames": 9, "steps": 3}


@pytest.fixture(scope="module", params=PUBLISHED)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("cogvideox") / kind, kind)


@pytest.fixture(scope="module")
def theirs(folder):
    return diffusers.DiffusionPipeline.from_pretrained(folder)


@pytest.fixture
def spec(folder):
    return CogVideoXSpec.open(Checkpoint(folder))


@pytest.mark.parametrize("solver", ["ddim", "dpm"])
def test_latents_timesteps_and_guidance_are_those_of_diffusers(solver, spec, theirs):
    request = GenerationRequest(prompt="a cat", image=PHOTO if "i2v" in spec.tasks else None, solver=solver, **SIZE)
    plan = spec.plan(request)
    schedule, seen = spec.schedule(plan.request), []
    kinds = {"ddim": diffusers.CogVideoXDDIMScheduler, "dpm": diffusers.CogVideoXDPMScheduler}
    theirs.scheduler = kinds[solver].from_config(theirs.scheduler.config)

    def look(pipeline, step, timestep, values):
        seen.append((float(timestep), pipeline.guidance_scale, tuple(values["latents"].shape)))
        return values

    extra = {} if request.image is None else {"image": load_image(request.image)}
    theirs(
        **extra, prompt="a cat", height=64, width=96, num_frames=9, num_inference_steps=3,
        guidance_scale=plan.request.guidance_scale, use_dynamic_cfg=solver == "dpm",
        generator=torch.Generator().manual_seed(0), output_type="latent", callback_on_step_end=look,
    )  # fmt: skip
    _, channels, frames, height, width = spec.latent_shape(plan.request)
    assert [timestep for timestep, _, _ in seen] == schedule.timesteps.tolist()
    np.testing.assert_allclose([scale for _, scale, _ in seen], schedule.guidance)
    assert {shape for _, _, shape in seen} == {(1, frames, channels, height, width)}


def test_a_checkpoint_is_read_as_the_model_that_it_was_made_of(kind, spec):
    published = CogVideoXSpec(PUBLISHED[kind])
    assert (published.name, published.tasks) == (kind, ("i2v",) if kind.endswith("i2v") else ("t2v",))
    assert spec.config.noise == published.config.noise
    assert (spec.solvers, spec.stages) == (("dpm", "ddim"), ("encoder", "denoise", "decoder"))
    assert spec.defaults == published.defaults


@pytest.mark.parametrize(
    ("kind", "tokens", "padding"),
    [("cogvideox1.5-5b", 44_880, 1), ("cogvideox-5b", 17_550, 0), ("cogvideox1.5-5b-i2v", 44_880, 1)],
)
def test_full_size(kind, tokens, padding):
    spec = CogVideoXSpec(PUBLISHED[kind])
    request = spec.plan(GenerationRequest(), image=kind.endswith("i2v")).request
    assert spec.tokens(spec.latent_shape(request)) == 226 + tokens
    assert spec.padding(request) == padding


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("cogvideox1.5-5b", {"frames": 85}, r"frames.*\b85\b.*8n \+ 1\b.*\b81\b"),
        ("cogvideox1.5-5b", {"height": 2416}, "height.*2416.*cogvideox1.5-5b.*2400"),
        ("cogvideox-5b-i2v", {"height": 512}, r"height.*\b512\b.*cogvideox-5b-i2v.*\b480\b"),
        ("cogvideox-5b-i2v", {"frames": 25}, r"frames.*\b25\b.*cogvideox-5b-i2v.*\b49\b"),
        ("cogvideox-2b", {"shift": 3.0}, r"shift.*\b3\b.*cogvideox-2b"),
        ("cogvideox-2b", {"solver": "unipc"}, "'unipc'.* dpm.*ddim"),
        ("cogvideox-2b", {"steps": 1000, "frames": 0}, r"frames.*\b0\b"),
    ],
)
def test_what_a_model_does_not_make_is_refused_with_what_it_does(kind, fields, message):
    with pytest.raises(InvalidRequest, match=message):
        CogVideoXSpec(PUBLISHED[kind]).plan(GenerationRequest(**fields), image=kind.endswith("i2v"))


def test_a_scheduler_that_predicts_noise_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path / "checkpoint", "cogvideox-2b")
    diffusers.CogVideoXDDIMScheduler(prediction_type="epsilon").save_pretrained(folder / "scheduler")
    with pytest.raises(CheckpointError, match=r"prediction_type 'epsilon'.*'v_prediction'"):
        CogVideoXSpec.open(Checkpoint(folder))
