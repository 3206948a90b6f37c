"""A whole Helios video in one process against diffusers: its chunks, from the prompt, image or video to the pixels."""

import dataclasses
import functools
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from tests.wan_tpu.diffusers_steps import keep_latents
from tests.wan_tpu.helios_reference import PyramidPipeline
from wan_tpu import GenerationRequest, Video
from wan_tpu.commands.generate import plan_extension
from wan_tpu.data import Conditioning, DenoiseState, dump_value, parse_value
from wan_tpu.errors import InvalidInput, InvalidRequest
from wan_tpu.media.reading import count_frames, read_ends, read_frames
from wan_tpu.stage_machine import Decode, Step

KIND = "helios-distilled"
FPS = 24
REQUEST = GenerationRequest(prompt="a cat", seed=3, height=64, width=64, frames=66, steps=6)
DISTILLED = {"guidance_scale": 1.0, "pyramid_num_inference_steps_list": [2, 2, 2], "is_amplify_first_chunk": True}
SOURCE_FRAMES = 140  # Four whole chunks behind eight frames, and the history sees the last three.
SHORT_FRAMES = 35  # One chunk behind two frames.


@pytest.fixture(scope="module")
def requests(tmp_path_factory):
    """By what it begins with, the request."""
    pixels, folder = (
        np.random.default_rng(1).random((SOURCE_FRAMES, 64, 64, 3), np.float32),
        tmp_path_factory.mktemp("source"),
    )
    source = Video(pixels, 24.0).save(folder / "source.mp4")
    short = Video(pixels[:SHORT_FRAMES], 24.0).save(folder / "short.mp4")
    image = Image.fromarray((pixels[0] * 255).astype(np.uint8))
    return {
        "text": REQUEST,
        "image": dataclasses.replace(REQUEST, image=image),
        "video": dataclasses.replace(REQUEST, video=source),
        "short video": dataclasses.replace(REQUEST, video=short),
    }


@pytest.fixture(scope="module")
def run(requests, pipeline):
    """A function that returns, by what it begins with, the plan, the encoder's result, and operations with results."""

    @functools.cache
    def work(name):
        run = pipeline(KIND).make_executor(pipeline(KIND).plan(requests[name]))
        results = list(run.work())
        return run.plan, run.conditioning, results

    return work


def run_theirs(pipeline, request, **options):
    """Return the latents after each step, and the frames, of diffusers' pipeline."""
    pipeline.set_progress_bar_config(disable=True)
    latents = []

    if request.video is not None:
        options["video"] = read_frames(request.video, count_frames(request.video, FPS))
    video = pipeline(
        request.prompt,
        height=request.height,
        width=request.width,
        num_frames=request.frames,
        image=request.image,
        generator=torch.Generator().manual_seed(request.seed),
        callback_on_step_end=keep_latents(latents),
        output_type="np",
        **options,
    )
    return latents, video.frames[0]


def pixels(pipe, results):
    return np.concatenate([pipe.runtime.model.pixels(np.asarray(r[0])) for o, r in results if isinstance(o, Decode)])


def check_same(pipe, results, reference):
    expected, frames = reference
    events = [result for operation, result in results if isinstance(operation, Step)]
    for event, theirs in zip(events, expected, strict=True):
        assert np.abs(event.latents - theirs).max() / np.abs(theirs).max() < 1e-4, event.step
    ours = pixels(pipe, results)
    # diffusers leaves frames out at the end: it cuts several chunks as if they were one video of 4n + 1 frames.
    assert len(frames) == (len(ours) - 1) // 4 * 4 + 1
    assert np.abs(ours[: len(frames)] - frames).max() < 2e-3


@pytest.mark.parametrize(
    "name", ["text", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("image", "video"))]
)
def test_latents_and_pixels_of_each_chunk_are_those_of_diffusers(name, requests, run, checkpoint, pipeline):
    plan, _, results = run(name)
    assert plan.chunk_stops == (12, 18)
    theirs = run_theirs(PyramidPipeline.from_pretrained(checkpoint(KIND)), requests[name], **DISTILLED)
    check_same(pipeline(KIND), results, theirs)


GUIDED = {
    "helios-base": (diffusers.HeliosPipeline, {"num_inference_steps": 2}),
    "helios-mid": (PyramidPipeline, {"pyramid_num_inference_steps_list": [2, 2, 2]}),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "name", "frames"),
    [
        *(("helios-base", name, frames) for name, frames in (("image", 33), ("short video", 33), ("text", 66))),
        ("helios-mid", "text", 66),
    ],
)
def test_a_guided_model_makes_what_diffusers_makes(kind, name, frames, requests, checkpoint, pipeline):
    """In steps of one size, and of three, where diffusers takes no guided square."""
    pipe, (theirs, options) = pipeline(kind), GUIDED[kind]
    fields = {"steps": 2} if kind == "helios-base" else {"steps": 6, "width": 128}
    fields |= {"guidance_scale": 4.0, "frames": frames, "preset": "diffusers"}
    request = dataclasses.replace(requests[name], **fields)
    reference = run_theirs(theirs.from_pretrained(checkpoint(kind)), request, guidance_scale=4.0, **options)
    check_same(pipe, list(pipe.make_executor(pipe.plan(request)).work()), reference)


@pytest.mark.thorough
def test_operations_of_a_step_and_of_the_decoder_are_counted(pipeline, requests):
    model = pipeline(KIND).runtime.model
    planned = {name: pipeline(KIND).plan(requests[name]).request for name in ("text", "image", "video")}
    request = planned["text"]
    chunk, video = model.spec.latent_shape(request), model.spec.decoded_shape(request)
    assert model.flops.step(chunk, branches=2) == 2 * model.flops.step(chunk, branches=1) > 0
    assert model.flops.decoder(video) == 2 * model.flops.decoder(chunk) > 0
    of_text, of_image, of_video = (model.flops.encoder(each, prompts=1) for each in planned.values())
    assert of_video - of_text == 3 * (of_image - of_text) > 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "steps"),
    [("text", (12, 14, 15)), ("image", (13,)), ("video", (13,))],  # At a chunk's end, at a size's, within a size.
)
def test_a_run_resumes_bit_for_bit_within_a_chunk_and_between_two(name, steps, pipeline, run):
    pipe = pipeline(KIND)
    plan, conditioning, results = run(name)
    states = [result.state for operation, result in results if isinstance(operation, Step)]
    frames = pixels(pipe, results)
    conditioning, _ = parse_value(Conditioning, dump_value(conditioning), "embeddings")
    for step in steps:
        saved, _ = parse_value(DenoiseState, dump_value(states[step - 1]), "a snapshot")
        resumed = list(pipe.make_executor(plan, conditioning=conditioning, state=saved).work())
        assert np.array_equal(pixels(pipe, resumed), frames)


def test_videos_that_cant_be_continued_are_refused(requests, run, pipeline, tmp_path):
    pipe, source = pipeline(KIND), requests["video"].video
    for fields, field, message in (
        ({"video": source, "strength": 0.5}, "strength", "strength"),
        ({"strength": 1.0}, "strength", "video"),
        ({"video": source, "image": requests["image"].image}, "video", "image"),
    ):
        with pytest.raises(InvalidRequest, match=message) as raised:
            pipe.plan(dataclasses.replace(REQUEST, **fields))
        assert raised.value.field == field
    short = Video(np.zeros((32, 16, 16, 3), np.float32), 24.0).save(tmp_path / "short.mp4")
    with pytest.raises(InvalidRequest, match=r"\b32 frames.*\b33\b"):
        pipe.generate(dataclasses.replace(REQUEST, video=short))
    _, conditioning, _ = run("text")
    with pytest.raises(InvalidInput, match="encoder"):
        pipe.initial_state(pipe.plan(requests["image"]), conditioning=conditioning)


def test_a_video_is_extended_by_its_motion_unless_it_is_too_short(requests, pipeline, tmp_path):
    spec, source = pipeline(KIND).runtime.model.spec, requests["short video"].video
    extension = dataclasses.replace(REQUEST, height=None, width=None)
    [frame, *_] = frames = read_frames(source, 32)
    plan, joined = plan_extension(spec, extension, Path(source), frame.size[::-1], tmp_path)
    request = plan.request
    assert joined == Path(source)
    assert (request.video, request.image, request.hidden_frames) == (str(source), None, 0)
    assert (request.height, request.width, request.strength) == (64, 64, 1)
    short = Video(np.stack([np.asarray(frame) / 255 for frame in frames]), 24.0).save(tmp_path / "short.mp4")
    request = plan_extension(spec, extension, Path(short), frame.size[::-1], tmp_path)[0].request
    assert (request.video, request.hidden_frames) == (None, 1) and isinstance(request.image, Image.Image)


def test_the_ends_of_a_video_are_its_first_frame_and_its_last_ones(requests):
    source = requests["video"].video
    frames = read_frames(source, SOURCE_FRAMES)
    assert count_frames(source, FPS) == SOURCE_FRAMES
    for start, (first, *last) in ((start, read_ends(source, start, FPS)) for start in (0, 1, 107)):
        assert first.tobytes() == frames[0].tobytes()
        assert [frame.tobytes() for frame in last] == [frame.tobytes() for frame in frames[start:]]
