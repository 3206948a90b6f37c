"""LTX-2 goes on from the end of a video, and follows a given sound: against diffusers, and what is shown."""

import dataclasses
import functools

import diffusers
import jax
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2 import LTX2ConditionPipeline
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from transformers.audio_utils import mel_filter_bank, spectrogram

from tests.conftest import PHOTO
from tests.wan_tpu.minimax_h3_ref2va import write_sound
from tests.wan_tpu.test_ltx2_parity import LATENT_TOLERANCE, OFF, as_tokens, assert_close, watch_steps
from wan_tpu import GenerationRequest, InvalidRequest, load_pipeline
from wan_tpu.aot.programs import AbstractRuntime, stage_programs
from wan_tpu.commands.generate import plan_extension
from wan_tpu.data import DenoiseState, dump_value, parse_value
from wan_tpu.families import list_published, published_spec
from wan_tpu.families.ltx2 import known
from wan_tpu.families.ltx2.classes import DURATION_HEAD
from wan_tpu.families.ltx2.config import MODELS
from wan_tpu.families.ltx2.small import make_checkpoint
from wan_tpu.families.model import published_model
from wan_tpu.media.reading import read_sound
from wan_tpu.media.video import VideoWriter
from wan_tpu.reference import CONTINUED, ENDING, GOAL, SOUNDTRACK, TAIL, Reference, parse_reference
from wan_tpu.runtime.mesh import make_mesh
from wan_tpu.segments import FRAME, MOTION, choose_motion
from wan_tpu.stages.written import Ending, cut_tail
from wan_tpu.tail import Tail, blend_goal, parse_tail

SIZE = {"height": 64, "width": 128}
FRAMES, SHARED, BLENDED, LATENTS, SOUNDS = 49, 25, 16, 4, 24
RATE = 48000  # Of the small model's sound.
GUIDED, DISTILLED = "ltx-2.3", "ltx-2.3-distilled"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return functools.cache(lambda kind: make_checkpoint(tmp_path_factory.mktemp("ltx2") / kind, kind))


@pytest.fixture(scope="module")
def pipelines(folders):
    return functools.cache(lambda kind: load_pipeline(folders(kind), "float32", mesh=(1, 1, 1)))


def make(pipe, prompt, seed, *references, **fields):
    """Return a video, and the state after each step."""
    states = []
    fields = {"frames": FRAMES, **SIZE, **fields}
    request = GenerationRequest(prompt=prompt, seed=seed, references=list(references), **fields)
    return pipe.generate(request, on_step=lambda event: states.append(event.state)), states


@pytest.fixture(scope="module")
def first(pipelines):
    return make(pipelines(DISTILLED), "a ball rolls", 3)


@pytest.fixture(scope="module")
def second(pipelines, first):
    return make(pipelines(DISTILLED), "it falls, and rings", 4, first[0].tail)


@pytest.mark.parametrize("guided", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_clip_goes_on_as_in_diffusers(guided, folders, pipelines):
    rng, pipe = np.random.default_rng(0), pipelines(GUIDED)
    coarse = rng.integers(0, 255, (SHARED, 8, 16, 3))
    pixels = coarse.repeat(8, 1).repeat(8, 2).astype(np.uint8)
    end = Reference(CONTINUED, Tail(None, None, 64, 128, SHARED, 0, pixels=pixels), 64, 128, SHARED)
    theirs = LTX2ConditionPipeline(**diffusers.LTX2Pipeline.from_pretrained(folders(GUIDED)).components)
    options = OFF if not guided else {"guidance_scale": 3.0, "spatio_temporal_guidance_blocks": [1]}
    seen, watching = watch_steps(theirs)
    theirs(
        conditions=[LTX2VideoCondition(frames=pixels)], prompt="it falls", negative_prompt="dull", num_frames=33,
        frame_rate=24.0, num_inference_steps=2, generator=torch.Generator().manual_seed(5), output_type="latent",
        **SIZE, **options, **watching,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    fields = {"steps": 2, "seed": 5, "frames": 33, "preset": "diffusers", **SIZE}
    fields |= {} if guided else {"guidance_scale": 1.0}
    request = GenerationRequest(prompt="it falls", negative_prompt="dull", references=[end], **fields)
    plan, states = pipe.plan(request), []
    conditioning = pipe.encode(plan)
    # That pipeline draws tokens of both, and the others latents.
    tokens, sounds = (torch.randn(shape, generator=generator).numpy() for shape in ((5 * 8, 16), (1, 34, 32)))
    state = dataclasses.replace(pipe.initial_state(plan, tokens.T.reshape(1, 16, 5, 2, 4)), audio=sounds)
    finished = pipe.denoise(plan, conditioning, state, on_step=lambda event: states.append(event.state))
    assert len(states) == len(seen) == 2
    for state, (latents, sound) in zip(states, seen, strict=True):
        # Known latents, which theirs hold from the first step on and ours at last, aren't compared but here.
        ours = as_tokens(np.asarray(state.latents))
        assert_close(ours[:, LATENTS * 8 :], latents[:, LATENTS * 8 :], LATENT_TOLERANCE)
        assert_close(np.asarray(state.audio), sound, LATENT_TOLERANCE)
    assert_close(as_tokens(finished.latents), seen[-1][0], LATENT_TOLERANCE)


@pytest.mark.thorough
def test_known_latents_stay_as_they_are(pipelines, first, second):
    """In both stages, and to the last bit after them."""
    pipe, tail = pipelines(DISTILLED), first[0].tail
    request = GenerationRequest(prompt="it falls, and rings", seed=4, references=[tail], frames=FRAMES, **SIZE)
    plan, states = pipe.plan(request), second[1]
    conditioning, room = pipe.encode(plan), pipe.runtime.model.spec.find_room(plan.request)
    assert (room.frames, room.audio, room.sizes) == ((LATENTS, 0), (SOUNDS, 0), ((1, 2), (2, 4)))
    np.testing.assert_allclose(np.asarray(states[7].latents)[:, :, :LATENTS], tail.smaller, atol=1e-5)
    assert not np.allclose(np.asarray(states[7].latents)[:, :, LATENTS:][:, :, :2], tail.smaller[:, :, :2], atol=0.1)
    # A state of the second stage goes on from its file.
    again, _ = parse_value(DenoiseState, dump_value(states[8]), "it")
    finished = pipe.denoise(plan, conditioning, again)
    np.testing.assert_array_equal(finished.latents[:, :, :LATENTS], tail.latents)
    np.testing.assert_array_equal(finished.audio[0, :SOUNDS], conditioning.image_latents[0, -SOUNDS:])
    np.testing.assert_array_equal(finished.smaller, second[0].tail.smaller)
    np.testing.assert_array_equal(finished.latents[:, :, LATENTS:], np.asarray(states[-1].latents)[:, :, LATENTS:])


@pytest.mark.thorough
def test_the_join_is_like_any_place_inside_a_video(pipelines, first, second):
    pipe, (video, states), (following, after) = pipelines(DISTILLED), first, second
    whole, shown = video.join(following), FRAMES - BLENDED
    latents = [np.asarray(states[-1].latents), np.asarray(after[-1].latents)[:, :, LATENTS:]]
    decoded = np.concatenate(list(pipe.decode(np.concatenate(latents, axis=2))))
    assert whole.pixels.shape == decoded.shape == (2 * FRAMES - SHARED, 64, 128, 3)
    # What follows far behind moves any frame a little. Nearer to the end of the first, it moves them more.
    jumps = 255 * np.diff(whole.pixels.mean(axis=(1, 2, 3)) - decoded.mean(axis=(1, 2, 3)))
    assert abs(jumps[shown - 1]) < 0.5
    errors = np.abs(whole.pixels - decoded).mean(axis=(1, 2, 3))
    assert errors[shown - 1] < np.abs(video.pixels[-1] - decoded[FRAMES - 1]).mean() / 2
    assert errors[shown] < np.abs(following.pixels[0] - decoded[FRAMES - SHARED]).mean() / 2
    # The sound of the first goes on in the second until it is blended with what that one decodes.
    begin, blend = (round(frames / 24 * RATE) for frames in (FRAMES - SHARED, shown))
    np.testing.assert_array_equal(following.audio[:, : blend - begin], video.audio[:, begin:blend])
    np.testing.assert_array_equal(whole.audio[:, :blend], video.audio[:, :blend])
    rest = video.audio[:, begin:]
    assert not np.array_equal(following.audio[:, : rest.shape[1]], rest)
    assert whole.audio.shape[1] == begin + following.audio.shape[1]


@pytest.mark.thorough
def test_a_take_of_a_segment_ends_as_the_other_did(pipelines, first, second):
    pipe = pipelines(DISTILLED)
    goal = dataclasses.replace(parse_reference(second[0].tail), kind="goal")
    again, states = make(pipe, "it flies", 9, first[0].tail, goal, frames=65)
    np.testing.assert_array_equal(again.tail.latents, second[0].tail.latents)
    np.testing.assert_allclose(np.asarray(states[7].latents)[:, :, -LATENTS:], second[0].tail.smaller, atol=1e-5)
    np.testing.assert_allclose(np.asarray(states[7].latents)[:, :, :LATENTS], first[0].tail.smaller, atol=1e-5)
    # Its sound begins as the first one's ends, and ends as the other take's.
    blend, rest = round((65 - SHARED + BLENDED) / 24 * RATE), goal.source.sound[:, round(BLENDED / 24 * RATE) :]
    np.testing.assert_array_equal(again.audio[:, blend : blend + rest.shape[1]], rest)
    shown = round((SHARED - BLENDED) / 24 * RATE)
    np.testing.assert_array_equal(again.audio[:, :shown], first[0].tail.sound[:, :shown])


@pytest.fixture
def song(tmp_path):
    return write_sound(tmp_path / "song.wav", 1.001, rate=16000)


@pytest.mark.thorough
def test_both_stages_of_a_talking_picture_see_it_by_the_rules_of_diffusers(pipelines, song):
    """Its first latent frame is that of a request for one stage with the image alone."""
    pipe = pipelines(DISTILLED)
    request = GenerationRequest(prompt="a", image=PHOTO, preset="diffusers", frames=33, **SIZE)
    expected = pipe.encode(pipe.plan(dataclasses.replace(request, steps=8))).image_latents
    plan, states = pipe.plan(dataclasses.replace(request, references=[f"soundtrack:{song}"])), []
    conditioning, start = pipe.encode(plan), pipe.initial_state(plan)
    finished = pipe.denoise(plan, conditioning, start, on_step=lambda event: states.append(event.state))
    assert expected.shape[3:] == (2, 4) and len(states) == 11
    assert_close(finished.latents[:, :, :1], expected, 1e-5)
    assert_close(np.asarray(states[-1].latents)[:, :, :1], expected, 1e-5)
    np.testing.assert_array_equal(finished.audio[0], conditioning.image_latents[0, -finished.audio.shape[1] :])


def test_spectrograms_are_those_of_another_library(song):
    samples, rate = read_sound(song, 10)
    track = Tail(None, samples, 0, 0, 0, 0, rate)
    config = published_spec("ltx-2.3").config
    filters = mel_filter_bank(513, 64, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney")
    theirs = spectrogram(
        samples[0].astype(np.float64), np.hanning(1025)[:-1], 1024, 160, power=1.0, mel_filters=filters,
        mel_floor=1e-5, log_mel="log",
    )  # fmt: skip
    ours = known.make_mel(config, track, 20)
    assert ours.shape == (1, 2, 77, 64)
    for channel in ours[0]:
        np.testing.assert_allclose(np.exp(channel), np.exp(theirs.T[:77]), atol=1e-6)
    assert known.make_mel(config, track, 30)[0, 0, -1].max() < -11  # Behind the end, there is silence.


def test_a_video_shorter_than_what_the_next_one_needs_has_no_end():
    request = published_spec(GUIDED).plan(GenerationRequest(prompt="a", frames=17)).request
    ending = Ending(np.zeros((1, 128, 3, 16, 24), np.float32), None)
    assert cut_tail(published_spec(GUIDED), request, ending, np.zeros((2, 40000), np.float32), RATE) is None


def test_a_sound_that_ends_before_the_other_takes_own_end_stays():
    goal = Tail(None, np.ones((2, 50), np.float32), 64, 64, SHARED, BLENDED, 100)
    for samples, ends in ((30, 0.0), (60, 1.0)):
        assert blend_goal(np.zeros((2, samples), np.float32), goal, 40, 240.0)[0, -1] == ends


def test_another_rate_than_that_of_the_video_before_is_refused():
    tail = Tail(np.zeros((1, 128, LATENTS, 16, 24), np.float32), None, 512, 768, SHARED, BLENDED, fps=24)
    for end in (tail, parse_tail(tail.dump(), "it")):
        published_spec(GUIDED).plan(GenerationRequest(prompt="a", frames=121, references=[end]))
        with pytest.raises(InvalidRequest) as refused:
            published_spec(GUIDED).plan(GenerationRequest(prompt="a", frames=121, fps=30.0, references=[end]))
        assert refused.value.field == "fps"


def test_ends_that_do_not_fit_are_refused_before_any_work():
    """LTX-2.3's and 2.5's VAEs are the same; LTX-2's latents have their shape, but mean something else."""
    made = {}
    for name in ("ltx-2", "ltx-2.3", "ltx-2.5"):
        spec = published_spec(name)
        request = spec.plan(GenerationRequest(prompt="a", frames=121)).request
        shapes = [spec.latent_shapes(request, expert.stop)["video"] for expert in spec.experts(request)]
        arrays = [np.zeros((*shape[:2], LATENTS, *shape[3:]), np.float32) for shape in (shapes[-1], shapes[0])]
        end = cut_tail(spec, request, Ending(arrays[0], arrays[1] if len(shapes) > 1 else None))
        made[name] = parse_tail(end.dump(), "it")

    def plan(name, end):
        published_spec(name).plan(GenerationRequest(prompt="a", frames=121, references=[end]))

    plan("ltx-2.5", made["ltx-2.3"])
    plan("ltx-2.5", dataclasses.replace(made["ltx-2.3"], vae=""))  # As earlier versions stored it.
    for name, end in [
        ("ltx-2.5", made["ltx-2"]),
        ("ltx-2", made["ltx-2.5"]),
        ("ltx-2.5", dataclasses.replace(made["ltx-2.5"], latents=made["ltx-2.5"].latents[:, :64], smaller=None)),
    ]:
        with pytest.raises(InvalidRequest) as refused:
            plan(name, end)
        assert refused.value.field == "references"


def test_what_is_too_short_to_go_on_with_motion_begins_with_the_last_frame(tmp_path):
    with VideoWriter(tmp_path / "clip.mp4", fps=24) as writer:
        writer.write(np.zeros((30, 128, 128, 3), np.uint8))
    spec = published_spec("ltx-2")
    plans = [
        plan_extension(spec, GenerationRequest(prompt="a", frames=n), tmp_path / "clip.mp4", (128, 128), tmp_path)[0]
        for n in (17, 49)
    ]
    assert [plan.request.image is not None for plan in plans] == [True, False]


def test_a_segment_whose_length_is_open_goes_on_with_motion():
    spec = published_spec("ltx-2.5")
    spec = dataclasses.replace(spec, config=dataclasses.replace(spec.config, duration_head=DURATION_HEAD))
    request = spec.plan(GenerationRequest(prompt="a")).request
    assert request.max_seconds is not None and choose_motion(spec, request, MOTION, CONTINUED)


def test_as_much_is_read_of_a_file_as_any_model_continues():
    overlaps = [overlap.frames for name in list_published() if (overlap := published_spec(name).overlap) is not None]
    assert max(overlaps) == ENDING


def test_every_model_goes_on_by_default():
    for name in MODELS:
        spec = published_spec(name)
        request = spec.plan(GenerationRequest(prompt="a", frames=121)).request
        assert choose_motion(spec, request, None) and not choose_motion(spec, request, FRAME)
        short = spec.plan(GenerationRequest(prompt="a", frames=25)).request
        assert not choose_motion(spec, short, None)
        with pytest.raises(InvalidRequest) as refused:
            choose_motion(spec, short, MOTION)
        assert refused.value.field == "continue_by"


END, TRACK = Reference(TAIL, None, 512, 768, SHARED, 50000, RATE), Reference(SOUNDTRACK, None, samples=9, sample_rate=9)


@pytest.mark.parametrize(
    ("references", "fields", "field"),
    [
        ([END], {"frames": 25}, "frames"),
        ([END], {"frames": 121, "height": 768, "width": 512}, "size"),
        ([dataclasses.replace(END, frames=17)], {"frames": 121}, "references"),
        ([END, END], {"frames": 121}, "references"),
        ([END, dataclasses.replace(END, kind=GOAL)], {"frames": 57}, "frames"),
        ([dataclasses.replace(END, kind=CONTINUED)], {"frames": 121, "fps": 25.0}, "fps"),
        ([TRACK, TRACK], {"frames": 121}, "references"),
        ([TRACK], {"frames": 121, "generate_audio": False}, "generate_audio"),
        ([TRACK], {}, "frames"),  # The model would choose the length by the prompt.
        ([Reference("image", None, 64, 64)], {"frames": 121}, "references"),
        ([Reference("image", None, 64, 64), END], {"frames": 121}, "references"),
        ([END], {"frames": 121, "image": np.zeros((64, 64, 3), np.uint8)}, "references"),
        ([TRACK], {"frames": 121, "last_image": np.zeros((64, 64, 3), np.uint8)}, "references"),
    ],
)
def test_what_the_model_can_not_take_is_refused(references, fields, field):
    spec = published_spec("ltx-2.5")
    spec = dataclasses.replace(spec, config=dataclasses.replace(spec.config, duration_head=DURATION_HEAD))
    with pytest.raises(InvalidRequest) as refused:
        spec.plan(GenerationRequest(prompt="a", references=references, **fields))
    assert refused.value.field == field


def test_the_last_frames_of_a_file_are_kept():
    pixels = np.arange(30, dtype=np.uint8)[:, None, None, None]
    sound = np.arange(30, dtype=np.float32)[None]
    reference = Reference(CONTINUED, Tail(None, sound, 1, 1, 30, 0, 24, pixels), 1, 1, 30, 30, 24).keep_last(SHARED)
    assert (reference.frames, reference.samples, reference.source.frames) == (SHARED, SHARED, SHARED)
    assert reference.source.pixels[0, 0, 0, 0] == reference.source.sound[0, 0] == 30 - SHARED


@pytest.mark.thorough
def test_programs_for_segments_are_known_before_there_is_one():
    """Those of both stages, and one that encodes the sound, whose length doesn't depend on the video's."""
    model = published_model(DISTILLED)
    mesh = make_mesh((1, 1, 1), heads=model.spec.heads, devices=jax.devices()[:1])
    request = GenerationRequest(prompt="a", height=512, width=768, frames=121)
    [segment] = model.spec.typical_references(request)
    programs = stage_programs(AbstractRuntime(model, mesh, "bfloat16"), model.spec.plan(segment).request)
    _, (_, mel), calls = programs["audio_encoder [1, 2, 93, 64]"]
    assert (mel.shape[2], calls) == (4 * SOUNDS - 3, 1)
    for name in ("denoise step, smaller", "denoise step"):
        program, (params, parts, numbers, (keys, rows)), _ = programs[name]
        assert rows.shape == (1, LATENTS * (8 * 12 + 16 * 24) + SOUNDS, 128)
        (video, _), (audio, _) = parts["video"], parts["audio"]
        changed, *_ = jax.eval_shape(program.function, params, parts, numbers, (keys, rows))
        assert (changed["video"][0].shape, changed["audio"][0].shape) == (video.shape, audio.shape)
    assert not model.spec.typical_references(dataclasses.replace(request, frames=SHARED))
