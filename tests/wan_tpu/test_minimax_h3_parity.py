"""MiniMax-H3 as a whole, against diffusers' modular pipeline: latents of both parts after each step, pixels, sound."""

import numpy as np
import pytest
from PIL import Image

from tests.wan_tpu.minimax_h3_reference import Reference, relative
from wan_tpu import GenerationRequest, load_pipeline
from wan_tpu.aot.programs import programs_by_images
from wan_tpu.data import DenoiseState, dump_value, parse_value
from wan_tpu.families.minimax_h3.small import make_checkpoint
from wan_tpu.families.shared.tokens import patchify

SIZE = {"height": 64, "width": 96}
STEPS, SEED = 3, 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("h3") / "model")


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder)


@pytest.fixture(scope="module")
def pipe(folder):
    return load_pipeline(folder, dtype="float32")


def draw_picture(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (64, 96, 3), np.uint8))


@pytest.mark.long
def test_requests_with_and_without_keyframes_compile_nothing_after_a_warm_up(pipe):
    """It comes first, because later tests would compile what it expects to be compiled."""
    fields = {"prompt": "A dog.", "steps": 1, **SIZE}
    usual = pipe.plan(GenerationRequest(**fields)).request
    for group in programs_by_images(pipe.runtime, usual, ("encoder", "denoise")).values():
        for _, program, arguments in group:
            program.compile(*arguments)
    compiled = pipe.runtime.compile_s
    for names in ((), ("image",), ("last_image",), ("image", "last_image")):
        plan = pipe.plan(GenerationRequest(**fields, **{name: draw_picture(2) for name in names}))
        conditioning = pipe.encode(plan)
        assert (conditioning.has_image, conditioning.has_last_image) == ("image" in names, "last_image" in names)
        pipe.denoise(plan, conditioning, pipe.initial_state(plan))
        assert pipe.runtime.compile_s == compiled, names


@pytest.mark.parametrize(
    ("prompt", "images"),
    [
        ("A cat plays the piano.", {}),
        pytest.param("猫 " * 40, {}, marks=pytest.mark.long),
        pytest.param("A cat plays the piano.", {"image": 0}, marks=pytest.mark.long),
        pytest.param("A cat plays the piano.", {"last_image": 1}, marks=pytest.mark.long),
        ("A cat plays the piano.", {"image": 0, "last_image": 1}),
    ],
    ids=["text", "long text", "first frame", "last frame", "first and last frame"],
)
def test_same_latents_pixels_and_sound_as_diffusers(prompt, images, pipe, reference):
    images = {name: draw_picture(seed) for name, seed in images.items()}
    pixels, sound, latents = reference(steps=STEPS, seed=SEED, prompt=prompt, num_frames=124, **SIZE, **images)
    states = []
    request = GenerationRequest(prompt=prompt, steps=STEPS, seed=SEED, **SIZE, **images)
    video = pipe.generate(request, on_step=lambda event: states.append(event.state))
    assert len(states) == STEPS
    for state, rows, audio in zip(states, latents["video"], latents["sound"], strict=True):
        assert relative(patchify(np.asarray(state.latents), (1, 2, 2)), rows) < 1e-4
        assert relative(np.asarray(state.audio)[0], audio) < 1e-4
    assert video.pixels.std() > 0.02 and video.audio.std() > 1e-3
    assert np.abs(video.pixels - pixels).max() < 2e-3
    assert relative(video.audio, sound) < 2e-3
    assert video.audio_rate == 32000


def test_a_run_goes_on_from_a_state_bit_for_bit(pipe):
    plan = pipe.plan(GenerationRequest(prompt="A cat plays the piano.", steps=STEPS, seed=SEED, **SIZE))
    conditioning, start = pipe.encode(plan), pipe.initial_state(plan)
    whole = pipe.denoise(plan, conditioning, start)
    for stop in (1, 2):
        content = dump_value(pipe.denoise(plan, conditioning, start, stop=stop))
        state, _ = parse_value(DenoiseState, content, "a snapshot")
        assert state.step == stop
        resumed = pipe.denoise(plan, conditioning, state)
        assert np.array_equal(whole.latents, resumed.latents) and np.array_equal(whole.audio, resumed.audio)
