"""Whole runs of LTX-2 against diffusers' own pipelines: latents of video and sound, pixels, samples."""

import functools

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplePipeline, LTX2LatentUpsamplerModel
from PIL import Image

from tests.conftest import PHOTO
from wan_tpu.errors import InvalidInput, InvalidRequest
from wan_tpu.families import published_spec
from wan_tpu.families.ltx2.published import DISTILLED_SIGMAS, SECOND_STAGE_SIGMAS
from wan_tpu.families.ltx2.small import make_checkpoint
from wan_tpu.media.image import load_image
from wan_tpu.pipeline import load_pipeline
from wan_tpu.request import GenerationRequest

LATENT_TOLERANCE, PIXEL_TOLERANCE, SOUND_TOLERANCE = 1e-4, 2e-3, 2e-3
# Tests of one model share its programs.
SIZE = {"height": 64, "width": 128, "frames": 9, "seed": 5, "preset": "diffusers"}
PROMPTS = {
    "plain": ("A cat in the rain.", "blurred, distorted, of low quality"),
    "nothing": ("", ""),
    "long": ("Дождь, 雨, مطر. " * 700, "blurred"),
}
OFF = {
    "guidance_scale": 1.0,
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "audio_guidance_scale": 1.0,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
    "audio_guidance_rescale": 0.0,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return functools.cache(lambda kind: make_checkpoint(tmp_path_factory.mktemp("ltx2") / kind, kind))


@pytest.fixture(scope="module")
def pipelines(folders):
    return functools.cache(lambda kind, dtype="float32": load_pipeline(folders(kind), dtype, mesh=(1, 1, 1)))


def watch_steps(pipe):
    """Return a list to which every step of diffusers' pipeline adds the latents of video and sound, as tokens."""
    seen = []

    def note(pipe, index, time, values):
        seen.append((values["latents"].numpy().copy(), values["audio_latents"].numpy().copy()))
        return {}

    pipe._callback_tensor_inputs = [*pipe._callback_tensor_inputs, "audio_latents"]
    return seen, {"callback_on_step_end": note, "callback_on_step_end_tensor_inputs": ["latents", "audio_latents"]}


def as_tokens(latents):
    return latents[0].reshape(latents.shape[1], -1).T[None]


def assert_close(ours, theirs, tolerance):
    assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("kind", "prompts", "has_image"),
    [
        ("ltx-2.3", "plain", False),
        pytest.param("ltx-2.3", "nothing", True, marks=pytest.mark.thorough),
        pytest.param("ltx-2.3", "long", False, marks=pytest.mark.thorough),
        pytest.param("ltx-2", "plain", True, marks=pytest.mark.thorough),
        pytest.param("ltx-2.3-distilled", "plain", False, marks=pytest.mark.thorough),
        pytest.param("ltx-2.5-distilled", "plain", True, marks=pytest.mark.thorough),
        pytest.param("ltx-2.5", "plain", False, marks=pytest.mark.thorough),
    ],
)
def test_same_latents_pixels_and_sound_as_diffusers(kind, prompts, has_image, folders, pipelines):
    prompt, negative = PROMPTS[prompts]
    pipe, image = pipelines(kind), load_image(PHOTO) if has_image else None
    steps = {"sigmas": DISTILLED_SIGMAS} if kind.endswith("distilled") else {"steps": 2}
    request = GenerationRequest(prompt=prompt, negative_prompt=negative, image=image, **SIZE, **steps)
    states = []
    video = pipe.generate(request, on_step=lambda event: states.append(event.state))

    theirs = diffusers.LTX2Pipeline.from_pretrained(folders(kind))
    options = {"num_inference_steps": 2, "guidance_scale": 3.0, "spatio_temporal_guidance_blocks": [1]}
    if kind.endswith("distilled"):
        options = OFF | {"sigmas": list(DISTILLED_SIGMAS)}
    if has_image:
        theirs, options = diffusers.LTX2ImageToVideoPipeline(**theirs.components), options | {"image": image}
    seen, watching = watch_steps(theirs)
    frames, audio = theirs(
        prompt=prompt, negative_prompt=negative, height=64, width=128, num_frames=9, frame_rate=24.0,
        generator=torch.Generator().manual_seed(5), output_type="np", return_dict=False, **options, **watching,
    )  # fmt: skip
    assert len(states) == len(seen) == len(pipe.runtime.model.spec.schedule(pipe.plan(request).request).timesteps)
    for state, (latents, sound) in zip(states, seen, strict=True):
        ours = as_tokens(np.asarray(state.latents))
        first = 8 if has_image else 0  # The first frame's tokens are the image's, which our state holds only at last.
        assert_close(ours[:, first:], latents[:, first:], LATENT_TOLERANCE)
        assert_close(np.asarray(state.audio), sound, LATENT_TOLERANCE)
    assert video.pixels.shape == frames[0].shape and video.pixels.std() > 0.02
    assert np.abs(video.pixels - frames[0]).max() <= PIXEL_TOLERANCE
    assert video.audio.shape == tuple(audio[0].shape) and video.audio.std() > 1e-3
    assert video.audio_rate == theirs.vocoder.config.output_sampling_rate
    assert_close(video.audio, audio[0].numpy(), SOUND_TOLERANCE)


def run_both_stages(folder, image, output, noise=None):
    """Return the video, the sound, and the latents of each step of the second stage, by diffusers' pipelines.

    `noise` are normalised latents to begin with, which have those of the image.
    """
    theirs = diffusers.LTX2Pipeline.from_pretrained(folder)
    if image is not None:
        theirs = diffusers.LTX2ImageToVideoPipeline(**theirs.components)
    doubling = LTX2LatentUpsamplePipeline(
        vae=theirs.vae, latent_upsampler=LTX2LatentUpsamplerModel.from_pretrained(folder / "latent_upsampler")
    )
    options = OFF | {"prompt": "A cat", "frame_rate": 24.0, "generator": torch.Generator().manual_seed(5)}
    options |= {"return_dict": False} | ({} if image is None else {"image": image})
    first = {}
    if noise is not None:
        mean, deviation = (getattr(theirs.vae, f"latents_{name}").view(1, -1, 1, 1, 1) for name in ("mean", "std"))
        first["latents"] = noise * deviation + mean
    latents, sound = theirs(
        height=32, width=64, num_frames=9, sigmas=list(DISTILLED_SIGMAS), output_type="latent", **first, **options
    )
    [latents] = doubling(latents=latents, output_type="latent", height=32, width=64, num_frames=9, return_dict=False)
    seen, watching = watch_steps(theirs)
    frames, audio = theirs(
        latents=latents, audio_latents=sound, height=64, width=128, num_frames=9, sigmas=list(SECOND_STAGE_SIGMAS),
        noise_scale=SECOND_STAGE_SIGMAS[0], output_type=output, **options, **watching,
    )  # fmt: skip
    return frames, audio, seen


@pytest.mark.thorough
@pytest.mark.parametrize("has_image", [False, True])
def test_second_stage_at_twice_the_size_is_that_of_diffusers(has_image, folders, pipelines):
    kind = "ltx-2.3-distilled"
    pipe, image = pipelines(kind), load_image(PHOTO) if has_image else None
    states = []
    video = pipe.generate(
        GenerationRequest(prompt="A cat", image=image, **SIZE), on_step=lambda event: states.append(event.state)
    )

    frames, audio, seen = run_both_stages(folders(kind), image, "np")
    assert (len(states), len(seen)) == (11, 3)
    for state, (expected, sound) in zip(states[8:], seen, strict=True):
        assert_close(as_tokens(np.asarray(state.latents)), expected, LATENT_TOLERANCE)
        assert_close(np.asarray(state.audio), sound, LATENT_TOLERANCE)
    assert np.abs(video.pixels - frames[0]).max() <= PIXEL_TOLERANCE
    assert_close(video.audio, audio[0].numpy(), SOUND_TOLERANCE)


@pytest.mark.thorough
def test_noise_of_ones_own_leaves_the_sound_and_the_second_stage_what_they_were(folders, pipelines):
    kind = "ltx-2.3-distilled"
    pipe, image = pipelines(kind), load_image(PHOTO)
    plan = pipe.plan(GenerationRequest(prompt="A cat", image=image, **SIZE))
    conditioning, drawn = pipe.encode(plan), pipe.initial_state(plan)
    noise = np.random.default_rng(7).standard_normal(drawn.latents.shape).astype(np.float32)
    first = pipe.denoise(plan, conditioning, pipe.initial_state(plan, noise), stop=8)
    last = pipe.denoise(plan, conditioning, first)

    latents = torch.from_numpy(noise)
    latents[:, :, :1] = torch.from_numpy(np.array(conditioning.image_latents))
    *_, seen = run_both_stages(folders(kind), image, "latent", latents)
    assert_close(as_tokens(last.latents), seen[-1][0], LATENT_TOLERANCE)
    assert_close(last.audio, seen[-1][1], LATENT_TOLERANCE)


@pytest.mark.thorough
def test_bfloat16_stays_within_its_bound(pipelines):
    """The bound of tests/wan_tpu/test_parity.py, with the sum of all scales that push in place of 2 g - 1."""
    blocks, states = 3, {}
    for dtype in ("float32", "bfloat16"):
        pipe = pipelines("ltx-2.3", dtype)
        plan = pipe.plan(GenerationRequest(prompt="A cat", steps=4, **SIZE))
        states[dtype] = pipe.denoise(plan, pipe.encode(plan), pipe.initial_state(plan))
    for part, scales in (("latents", (3 - 1, 1, 3 - 1)), ("audio", (7 - 1, 1, 3 - 1))):
        exact, rounded = (getattr(states[dtype], part) for dtype in ("float32", "bfloat16"))
        bound = (1 + 2 * sum(scales)) * np.sqrt(3 * blocks + 6) * 2**-8
        error = np.sqrt(((rounded - exact) ** 2).mean() / (exact**2).mean())
        assert 0 < error <= bound


def test_sound_can_be_left_out(pipelines):
    pipe = pipelines("ltx-2.3")
    with_sound, without = (
        pipe.generate(GenerationRequest(prompt="A cat", steps=2, generate_audio=has_sound, **SIZE))
        for has_sound in (None, False)
    )
    assert with_sound.audio is not None and without.audio is None
    assert np.array_equal(with_sound.pixels, without.pixels)


@pytest.mark.thorough
def test_an_error_within_a_stage_frees_its_weights(folders):
    pipe = load_pipeline(folders("ltx-2.3-distilled"), "float32", mesh=(1, 1, 1), keep_weights=False)

    def fail(event):
        if event.step == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipe.generate(GenerationRequest(prompt="A cat", height=64, width=128, frames=9), on_step=fail)
    assert not pipe.runtime._components


def test_image_of_another_number_of_stages_is_refused(pipelines):
    pipe = pipelines("ltx-2.3-distilled")
    plans = [
        pipe.plan(GenerationRequest(prompt="A cat", image=load_image(PHOTO), **SIZE, steps=steps)) for steps in (11, 8)
    ]
    conditioning = pipe.encode(plans[0])
    with pytest.raises(InvalidInput, match="encoder"):
        pipe.denoise(plans[1], conditioning, pipe.initial_state(plans[1]))


@pytest.mark.parametrize("size", [(64, 1), (20_000, 64)])
def test_image_of_any_shape_makes_a_video(size, pipelines):
    """diffusers compresses neither an image of a single row nor one that is larger than H.264 allows."""
    pipe = pipelines("ltx-2.3-distilled")
    image = Image.new("RGB", size, (200, 30, 30))
    plan = pipe.plan(GenerationRequest(prompt="A cat", image=image, height=64, width=128, frames=9))
    assert np.isfinite(pipe.encode(plan).image_latents).all()


@pytest.mark.parametrize(("frames", "fps"), [(9, 225.0), (121, 60.0)])
def test_rates_of_frames_that_sound_can_follow_are_planned(frames, fps):
    plan = published_spec("ltx-2.3").plan(GenerationRequest(prompt="A cat", frames=frames, fps=fps))
    assert published_spec("ltx-2.3").audio_shape(plan.request)[1] >= 1


@pytest.mark.parametrize(("frames", "fps", "nearest"), [(1, 60.0, "25"), (121, 0.1, "2.02"), (2001, 24.0, "33.4")])
def test_videos_whose_sound_is_too_long_or_too_short_are_refused(frames, fps, nearest):
    with pytest.raises(InvalidRequest, match=f"fps: {nearest}"):
        published_spec("ltx-2.3").plan(GenerationRequest(prompt="A cat", frames=frames, fps=fps))


def test_stages_of_other_sizes_have_programs_of_other_names():
    spec = published_spec("ltx-2.3-distilled")
    two_stages, single = (spec.plan(GenerationRequest(prompt="A cat", steps=steps)).shapes for steps in (11, 8))
    assert two_stages["denoise"].startswith("denoise 512x768x121")
    assert two_stages["refine"].startswith("refine 1024x1536x121")
    assert single["denoise"].startswith("denoise 1024x1536x121")
    slow = spec.plan(GenerationRequest(prompt="A cat", steps=8, fps=12)).shapes
    assert slow["denoise"] != single["denoise"] and slow["decoder"] != single["decoder"]
