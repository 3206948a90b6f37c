"""Whole runs of LTX-2 against the rules of Lightricks' own pipelines, in plain torch."""

import functools
import math

import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2.utils import DEFAULT_NEGATIVE_PROMPT
from PIL import Image

from scripts.published.ltx_rules import Lightricks, make_adapter, noise_levels
from tests.conftest import PHOTO
from tests.wan_tpu.minimax_h3_ref2va import write_sound
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families import open_spec, published_spec
from wan_tpu.families.ltx2.image import fit_as_lightricks
from wan_tpu.families.ltx2.known import make_mel
from wan_tpu.families.ltx2.published import NEGATIVE_PROMPT_25, TWO_STAGES
from wan_tpu.families.ltx2.small import make_checkpoint
from wan_tpu.families.model import open_model
from wan_tpu.families.shared.resampling import resample
from wan_tpu.media.image import load_image
from wan_tpu.media.reading import read_sound
from wan_tpu.pipeline import load_pipeline
from wan_tpu.request import GenerationRequest
from wan_tpu.tail import Tail

# Lightricks' own pipelines differ from this reference by up to 2e-6, and from us by up to 6e-6: scripts/compare_ltx.py,
# and for LTX-2.5, scripts/compare_ltx_25.py.
TOLERANCE = 2e-5
SIZE = (64, 128, 9)
STEPS, SEED, PROMPT = 2, 5, "A cat in the rain."


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return functools.cache(lambda kind: make_checkpoint(tmp_path_factory.mktemp("ltx2") / kind, kind))


@pytest.fixture(scope="module")
def song(tmp_path_factory):
    return write_sound(tmp_path_factory.mktemp("song") / "song.wav", 0.4, rate=16000)


def give(reference, folder, given, song):
    """Return an image and the latents of a sound, or None for each that isn't given, and our fields for them."""
    image, fields = None, {}
    if "image" in given:
        image = fields["image"] = load_image(PHOTO)
    if "sound" not in given:
        return (image, None), fields
    fields["references"] = [f"soundtrack:{song}"]
    samples, rate = read_sound(song, 1)
    track = Tail(None, samples, 0, 0, 0, 0, rate)
    mel = make_mel(open_spec(folder).config, track, round(SIZE[2] / 24 * 25))
    return (image, reference.encode_sound(torch.from_numpy(mel))), fields


def make_ours(folder, **fields):
    """Return the state after each step."""
    pipe, states = load_pipeline(folder, "float32", mesh=(1, 1, 1)), []
    height, width, frames = SIZE
    request = GenerationRequest(prompt=PROMPT, seed=SEED, height=height, width=width, frames=frames, **fields)
    plan = pipe.plan(request)
    start = pipe.initial_state(plan)
    pipe.denoise(plan, pipe.encode(plan), start, on_step=lambda event: states.append(event.state))
    for track in fields.get("references", ()):  # The sound is the given one, not what its latents decode to.
        samples, rate = read_sound(track.removeprefix("soundtrack:"), 1)
        sound, heard = pipe.decode_sound(states[-1], plan.request)
        given = resample(np.concatenate([samples, samples]), rate, heard)[:, : sound.shape[1]]
        np.testing.assert_array_equal(sound[:, : given.shape[1]], given)
        assert not sound[:, given.shape[1] :].any()
    return states


def assert_close(state, expected):
    for ours, theirs in zip((np.asarray(state.latents), np.asarray(state.audio)), expected, strict=True):
        assert np.abs(ours - theirs).max() <= TOLERANCE * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        pytest.param("ltx-2", "", marks=pytest.mark.thorough),
        pytest.param("ltx-2", "image", marks=pytest.mark.thorough),
        pytest.param("ltx-2", "image, sound", marks=pytest.mark.thorough),
        pytest.param("ltx-2.3", "", marks=pytest.mark.thorough),
        pytest.param("ltx-2.3", "image", marks=pytest.mark.thorough),
        pytest.param("ltx-2.3", "image, sound", marks=pytest.mark.thorough),
        pytest.param("ltx-2.5", "image", marks=pytest.mark.long),
        pytest.param("ltx-2.5", "image, sound", marks=pytest.mark.thorough),
    ],
)
def test_guided_models_make_what_lightricks_makes(kind, given, folders, song):
    reference = Lightricks(folders(kind))
    (image, sound), fields = give(reference, folders(kind), given, song)
    negative = NEGATIVE_PROMPT_25 if kind == "ltx-2.5" else DEFAULT_NEGATIVE_PROMPT
    expected = reference.make_in_one_stage(PROMPT, negative, STEPS, SEED, SIZE, image, sound)
    assert_close(make_ours(folders(kind), steps=STEPS, **fields)[-1], expected)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        pytest.param("ltx-2-distilled", "image", marks=pytest.mark.thorough),
        pytest.param("ltx-2-distilled", "image, sound", marks=pytest.mark.thorough),
        pytest.param("ltx-2.3-distilled", "", marks=pytest.mark.thorough),
        pytest.param("ltx-2.3-distilled", "image", marks=pytest.mark.thorough),
        pytest.param("ltx-2.3-distilled", "image, sound", marks=pytest.mark.thorough),
        pytest.param("ltx-2.5-distilled", "", marks=pytest.mark.thorough),
        pytest.param("ltx-2.5-distilled", "image", marks=pytest.mark.thorough),
        ("ltx-2.5-distilled", "image, sound"),
    ],
)
def test_both_stages_of_distilled_models_make_what_lightricks_makes(kind, given, folders, song):
    reference = Lightricks(folders(kind))
    (image, sound), fields = give(reference, folders(kind), given, song)
    first, second = reference.make_in_two_stages(PROMPT, SEED, SIZE, image, sound)
    states = make_ours(folders(kind), **fields)
    assert_close(states[7], first)
    assert_close(states[-1], second)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        *((kind, given) for kind in ("ltx-2", "ltx-2.3") for given in ("", "image", "image, sound")),
        *(("ltx-2.5", given) for given in ("image", "image, sound")),
    ],
)
def test_second_stage_after_guidance_makes_what_lightricks_makes_with_an_adapter(kind, given, folders, song, tmp_path):
    reference = Lightricks(folders(kind))
    (image, sound), fields = give(reference, folders(kind), given, song)
    negative = NEGATIVE_PROMPT_25 if kind == "ltx-2.5" else DEFAULT_NEGATIVE_PROMPT
    adapter = make_adapter(folders(kind), tmp_path / "distilled.safetensors")
    first, second = reference.make_and_refine(PROMPT, negative, STEPS, SEED, SIZE, adapter, image, sound)
    loras = [f"{adapter}@refine"]
    states = make_ours(folders(kind), preset=TWO_STAGES, steps=STEPS + 3, loras=loras, **fields)
    assert_close(states[STEPS - 1], first)
    assert_close(states[-1], second)


@pytest.mark.parametrize("kind", ["ltx-2", "ltx-2.3"])
def test_noise_levels_of_a_guided_model_are_lightricks_for_every_size_and_number_of_steps(kind):
    spec = published_spec(kind)
    for steps in range(2, 101):
        for size in ({}, {"height": 1088, "width": 1920, "frames": 257}):
            levels = spec.schedule(spec.plan(GenerationRequest(steps=steps, **size)).request).sigmas
            # To the last bit, except where torch, without fused operations, counts down less exactly.
            assert np.abs(np.append(levels[:steps], 0) - noise_levels(steps).numpy()).max() <= 2**-22


@pytest.mark.parametrize(
    ("picture", "size"),
    [((480, 640), (64, 128)), ((1000, 733), (512, 768)), ((50, 20), (64, 128)), ((2, 64), (64, 128))],
)
def test_middle_of_an_image_is_interpolated_as_torch_does_it(picture, size):
    pixels = np.random.default_rng(0).integers(0, 256, (*picture, 3), dtype=np.uint8)
    scale = max(size[0] / picture[0], size[1] / picture[1])
    whole = [math.ceil(side * scale) for side in picture]
    resized = torch.nn.functional.interpolate(
        torch.from_numpy(pixels).float().permute(2, 0, 1)[None], whole, mode="bilinear", align_corners=False
    )[0].permute(1, 2, 0)
    top, left = ((side - shown) // 2 for side, shown in zip(whole, size, strict=True))
    expected = resized[top : top + size[0], left : left + size[1]].numpy()
    # Of 255: torch rounds positions after fused operations.
    assert np.abs(fit_as_lightricks(Image.fromarray(pixels), *size) - expected).max() <= 0.01


@pytest.mark.parametrize(
    ("kind", "has_image", "differing"),
    [
        ("ltx-2", False, {"denoise"}),
        ("ltx-2.3", True, set()),
        ("ltx-2.3-distilled", False, set()),
        ("ltx-2.3-distilled", True, {"encoder", "refine"}),
        ("ltx-2.5", False, set()),
        ("ltx-2.5-distilled", False, {"denoise", "refine"}),
    ],
)
def test_programs_have_other_names_where_they_are_not_those_of_diffusers(kind, has_image, differing):
    spec = published_spec(kind)
    ours, theirs = (
        spec.plan(GenerationRequest(prompt="A cat", preset=preset), image=has_image).shapes
        for preset in (None, "diffusers")
    )
    assert {stage for stage, name in ours.items() if name != theirs[stage]} == differing


@pytest.mark.thorough
@pytest.mark.long
def test_work_of_every_evaluation_and_of_both_sizes_of_an_image_is_counted(folders):
    for kind, preset, evaluations in (("ltx-2", None, 4), ("ltx-2", "diffusers", 3), ("ltx-2.3-distilled", None, 1)):
        model = open_model(Checkpoint(folders(kind)))
        plan = model.spec.plan(GenerationRequest(prompt="A cat", preset=preset, height=64, width=64, frames=9))
        expert = plan.experts[-1]
        once = model.flops.step(model.spec.latent_shapes(plan.request, expert.stop)["video"], branches=1)
        assert model.count_step(plan.request, expert, images=0) == evaluations * once
    request = {"prompt": "A cat", "image": Image.new("RGB", (64, 64)), "height": 64, "width": 64, "frames": 9}
    both, first, text = (
        model.flops.encoder(model.spec.plan(GenerationRequest(**request | changed)).request, prompts=1)
        for changed in ({}, {"preset": "diffusers"}, {"image": None})
    )
    # The second size has four times the pixels, and so has almost all of the encoder's work.
    assert (both - text) / (first - text) == pytest.approx(5, rel=0.01)
