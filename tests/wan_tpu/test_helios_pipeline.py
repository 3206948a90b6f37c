"""A whole Helios video in one process against diffusers: three chunks, from the prompt to the pixels."""

import numpy as np
import pytest
import torch

from tests.wan_tpu.helios_reference import PyramidPipeline
from wan_tpu import GenerationRequest
from wan_tpu.data import DenoiseState, dump_value, parse_value
from wan_tpu.stage_machine import Decode, Step

KIND = "helios-distilled"
REQUEST = GenerationRequest(prompt="a cat", seed=3, height=64, width=64, frames=99, steps=6)


@pytest.fixture(scope="module")
def reference(checkpoint):
    """The latents after each step, and the frames, of diffusers' pipeline."""
    pipeline = PyramidPipeline.from_pretrained(checkpoint(KIND))
    pipeline.set_progress_bar_config(disable=True)
    latents = []

    def keep(pipeline, step, time, arrays):
        latents.append(arrays["latents"].numpy().copy())
        return arrays

    video = pipeline(
        REQUEST.prompt,
        height=REQUEST.height,
        width=REQUEST.width,
        num_frames=REQUEST.frames,
        guidance_scale=1.0,
        pyramid_num_inference_steps_list=[2, 2, 2],
        is_amplify_first_chunk=True,
        generator=torch.Generator().manual_seed(REQUEST.seed),
        callback_on_step_end=keep,
        output_type="np",
    )
    return latents, video.frames[0]


@pytest.fixture(scope="module")
def whole(pipeline):
    """The plan, the encoder's result, and all operations with their results."""
    pipe = pipeline(KIND)
    plan = pipe.plan(REQUEST)
    run = pipe.run(plan)
    return plan, run, list(run.work())


def pixels(pipe, results):
    return np.concatenate([pipe.runtime.model.pixels(np.asarray(r[0])) for o, r in results if isinstance(o, Decode)])


def test_latents_and_pixels_of_three_chunks_are_those_of_diffusers(pipeline, whole, reference):
    plan, _, results = whole
    expected, frames = reference
    steps = [result for operation, result in results if isinstance(operation, Step)]
    assert plan.steps == len(expected) == 24 and plan.chunk_stops == (12, 18, 24)
    for event, theirs in zip(steps, expected, strict=True):
        assert np.abs(event.latents - theirs).max() / np.abs(theirs).max() < 1e-4, event.step
    ours = pixels(pipeline(KIND), results)
    # diffusers leaves two frames out: it cuts 99 as if they were one video of 4n + 1 frames.
    assert (len(ours), len(frames)) == (99, 97)
    assert np.abs(ours[: len(frames)] - frames).max() < 2e-3


def test_operations_of_a_step_and_of_the_decoder_are_counted(pipeline, whole):
    model, request = pipeline(KIND).runtime.model, whole[0].request
    chunk, video = model.spec.latent_shape(request), model.spec.decoded_shape(request)
    assert model.flops.step(chunk, branches=2) == 2 * model.flops.step(chunk, branches=1) > 0
    assert model.flops.decoder(video) == 3 * model.flops.decoder(chunk) > 0


def test_a_run_resumes_bit_for_bit_within_a_chunk_and_between_two(pipeline, whole):
    pipe = pipeline(KIND)
    plan, run, results = whole
    states = [result.state for operation, result in results if isinstance(operation, Step)]
    frames = pixels(pipe, results)
    for step in (11, 12, 14, 15):  # Before and after a chunk's end, and before and after a size's.
        saved, _ = parse_value(DenoiseState, dump_value(states[step - 1]), "a snapshot")
        resumed = list(pipe.run(plan, conditioning=run.conditioning, state=saved).work())
        assert np.array_equal(pixels(pipe, resumed), frames)
