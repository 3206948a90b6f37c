"""Two requests of equal shape for the tests that step them at once, on any mesh."""

import dataclasses

import numpy as np

from tests.conftest import PHOTO
from wan_tpu import GenerationRequest, stages
from wan_tpu.data import Conditioning
from wan_tpu.families.wan_presets import TEXT_TOKENS

STEPS = 6


def run_of(pipe, number, done, **given):
    """Begin a request with a seed and conditioning of its own, `done` steps of which are done alone."""
    model = pipe.runtime.model
    asked = {"height": 48, "width": 80, "frames": 9, "steps": STEPS, "guidance_scale": 3.0 + number} | given
    request = pipe.resolve(
        GenerationRequest(prompt="a cat", seed=number, image=PHOTO if "i2v" in model.tasks else None, **asked)
    )
    rng = np.random.default_rng(number)
    text = rng.standard_normal((2, 1, TEXT_TOKENS, model.config.transformer["text_dim"])).astype(np.float32)
    image = None
    if request.image is not None:
        channels, *size = model.latent_shape(request)[1:]
        inside = model.config.transformer["in_channels"]
        channels, size = (channels, [1, *size[1:]]) if inside == channels else (inside - channels, size)
        image = rng.standard_normal((1, channels, *size)).astype(np.float32)
    request = dataclasses.replace(request, image=None)
    conditioning = Conditioning(text[0], text[1], None, image)
    expert = dataclasses.replace(pipe.experts(request)[0], stop=STEPS)  # all steps, to be at any of them
    inputs = stages.expert_inputs(pipe.runtime, expert, conditioning)
    state = stages.device_state(pipe.runtime, request, pipe.initial_state(request))
    run = stages.ExpertRun(pipe.runtime, request, expert, inputs, state)
    for _ in range(done):
        run.step()
    return run


def check(pipe, **given):
    """Two steps of two requests, at steps 0 and 3, are those of each alone."""
    alone, together = ([run_of(pipe, 0, 0, **given), run_of(pipe, 1, 3, **given)] for _ in range(2))
    for _ in range(2):
        expected = [run.step() for run in alone]
        got = together[0].step_with(together[1])
        assert [(e.stage, e.step, e.timestep) for e in got] == [(e.stage, e.step, e.timestep) for e in expected]
    assert [run.state.step for run in together] == [2, 5]
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(
            (one.state.latents, *one.state.history), (other.state.latents, *other.state.history), strict=True
        ):
            # 1e-5: the same float32 sums, in a program that may fuse them otherwise
            assert np.abs(np.asarray(a) - np.asarray(b)).max() <= 1e-5 * max(1.0, np.abs(np.asarray(a)).max())
    assert np.abs(np.asarray(alone[0].state.latents) - np.asarray(alone[1].state.latents)).max() > 0.1
