"""MiniMax-H3 goes on from the end of a video: its condition against diffusers' transformer, and what is shown."""

import dataclasses

import diffusers
import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import before_denoise as reference

from tests.wan_tpu.minimax_h3_ref2va import draw_image, write_sound, write_video
from tests.wan_tpu.minimax_h3_reference import relative
from wan_tpu import GenerationRequest, InvalidRequest, load_pipeline
from wan_tpu.families import published_spec
from wan_tpu.families.minimax_h3 import references as measuring
from wan_tpu.families.minimax_h3.small import make_checkpoint
from wan_tpu.media.reading import read_sound
from wan_tpu.reference import Reference, parse_reference
from wan_tpu.tail import parse_tail

SIZE = {"height": 64, "width": 96, "frames": 107}
PATCH, LATENTS, FRAMES, BLENDED = (1, 2, 2), 7, 22, 5
PUBLISHED = published_spec("minimax-h3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("h3") / "model")


@pytest.fixture(scope="module")
def pipe(folder):
    return load_pipeline(folder, dtype="float32")


def make(pipe, prompt, seed, *references):
    """Return a video of one step, and its state after that."""
    states = []
    request = GenerationRequest(prompt=prompt, steps=1, seed=seed, references=list(references) or None, **SIZE)
    video = pipe.generate(request, on_step=lambda event: states.append(event.state))
    return video, states[-1]


@pytest.fixture(scope="module")
def first(pipe):
    return make(pipe, "a ball rolls", 3)


@pytest.fixture(scope="module")
def second(pipe, first):
    return make(pipe, "it falls, and rings", 4, first[0].tail)


@torch.no_grad()
def predict_theirs(folder, model, plan, conditioning, state, track=None):
    """Return what diffusers' transformer for references computes of the same rows, for the first step of one.

    `track` are the latents of a sound that is given, without noise.
    """
    theirs = diffusers.MiniMaxH3Transformer3DModel.from_pretrained(folder / "transformer_ref").eval()
    measures = measuring.measure(model.config, plan.request)
    room, (visible, voices) = measuring.find_room(model.config, measures), measuring.count_rows(PATCH, measures)
    [text], [[count]] = conditioning.prompt["text"], conditioning.prompt["count"]
    rows = conditioning.image_latents[0]
    noise = reference.patchify_video_latents(torch.from_numpy(state.latents), PATCH)
    video = torch.cat([torch.from_numpy(rows[:visible]), noise])
    own = state.audio[0] if track is None else track
    sound = torch.from_numpy(np.concatenate([rows[room.visible : room.visible + voices, :16], own]))
    # Text, the end's frames, its sound, the new sound, the new frames.
    parts = [count, visible, voices, len(sound) - voices, len(video) - visible]
    kinds = np.repeat(range(5), parts)
    indices = [torch.from_numpy(np.flatnonzero(np.isin(kinds, chosen))) for chosen in ([0], [1, 4], [2, 3])]
    places = model.constants(plan.request, state.latents.shape, conditioning.prompt)["places"][: sum(parts)]
    of_video, of_sound = theirs(
        hidden_states=video[None],
        audio_hidden_states=sound[None],
        encoder_hidden_states=torch.from_numpy(text[None, :count]),
        timestep=torch.tensor([0, 0.999, 1]),
        timestep_indices=torch.from_numpy(np.array([0, 1, 2, 0 if track is None else 2, 0])[kinds]),
        token_tags=torch.from_numpy(np.array([1, 0, 2, 2, 0])[kinds]),
        position_ids=torch.from_numpy(places),
        video_indices=indices[1],
        audio_indices=indices[2],
        text_indices=indices[0],
        return_dict=False,
    )
    return (noise + of_video[0, visible:]).numpy(), state.audio[0] + of_sound[0, voices:].numpy()


@pytest.mark.parametrize("beside", [False, pytest.param(True, marks=pytest.mark.long)])
def test_same_latents_as_diffusers_transformer_with_the_end_as_a_condition(beside, pipe, folder, first, second):
    """The block begins when the new video does; diffusers' pipeline has no such block, but its module takes any."""
    references = [Reference("image", draw_image(1, 50, 40), 50, 40)] if beside else []
    fields = {"prompt": "it falls, and rings", "steps": 1, "seed": 4, **SIZE}
    plan = pipe.plan(GenerationRequest(references=[*references, first[0].tail], **fields))
    model, conditioning, state = pipe.runtime.model, pipe.encode(plan), pipe.initial_state(plan)
    ours = pipe.denoise(plan, conditioning, state) if beside else second[1]
    if not beside:
        video, sound = predict_theirs(folder, model, plan, conditioning, state)
        assert relative(reference.patchify_video_latents(torch.tensor(np.asarray(ours.latents)), PATCH), video) < 1e-4
        assert relative(np.asarray(ours.audio)[0], sound) < 1e-4
    measures = measuring.measure(model.config, plan.request)
    visible, voices = measuring.count_rows(PATCH, measures)
    # Its rows: latents with a thousandth of noise, and the waveform's end, encoded again.
    rows, tail = conditioning.image_latents[0], first[0].tail
    clean = reference.patchify_video_latents(torch.from_numpy(tail.latents), PATCH).numpy()
    difference = rows[visible - len(clean) : visible] - np.float32(0.999) * clean
    assert 0.0009 < difference.std() < 0.0011
    assert measures[-1].voices == 36 and tail.samples // 800 >= 36
    # Their places are those of the new video's first frames and of the beginning of its sound.
    places = model.constants(plan.request, state.latents.shape, conditioning.prompt)["places"]
    count, audio = int(conditioning.prompt["count"][0, 0]), state.audio.shape[1]
    ends = np.cumsum([count, visible, voices, audio])
    end_places = places[ends[1] - len(clean) : ends[1]], places[ends[2] - 72 : ends[2]].reshape(2, 36, 3)
    np.testing.assert_array_equal(end_places[0], places[ends[3] :][: len(clean)])
    np.testing.assert_array_equal(end_places[1], places[ends[2] : ends[3]].reshape(2, -1, 3)[:, :36])
    assert beside == (end_places[0][0, 0] > count)


def test_the_join_is_like_any_place_inside_a_video(pipe, first, second):
    """Frames, and sound but for what was decoded twice, are those of all latents decoded at once."""
    (video, state), (following, after) = first, second
    whole = video.join(following)
    latents = np.concatenate([np.asarray(state.latents), np.asarray(after.latents)[:, :, LATENTS:]], axis=2)
    decoded = np.concatenate(list(pipe.decode(latents)))
    assert whole.pixels.shape == decoded.shape == (2 * 107 - FRAMES, 64, 96, 3)
    np.testing.assert_allclose(whole.pixels, decoded, atol=1e-4)
    means = 255 * np.abs(whole.pixels.mean(axis=(1, 2, 3)) - decoded.mean(axis=(1, 2, 3)))
    shown = 107 - BLENDED
    own = 255 * np.abs(video.pixels[shown:].mean() - whole.pixels[shown : shown + BLENDED].mean())
    assert own > means.max()  # Frames of a clip that nothing follows are others.
    assert following.tail.samples == video.tail.samples and not np.array_equal(
        following.tail.latents, video.tail.latents
    )
    # The sound of the first goes on in the second until it is blended with what that one decodes.
    begin, blend, end = (round(frames / 24 * 32000) for frames in (107 - FRAMES, shown, 107))
    np.testing.assert_array_equal(following.audio[:, : blend - begin], video.audio[:, begin:blend])
    np.testing.assert_array_equal(whole.audio[:, :blend], video.audio[:, :blend])
    assert not np.array_equal(following.audio[:, : end - begin], video.audio[:, begin:end])
    assert whole.audio.shape[1] == video.audio.shape[1] - video.tail.samples + following.audio.shape[1]


@pytest.mark.thorough
def test_a_file_is_continued(pipe, tmp_path):
    path = write_video(tmp_path / "a.mp4", 43)
    request = GenerationRequest(prompt="on", steps=1, references=[f"continued:{path}"], frames=107)
    plan = pipe.plan(request)
    assert (plan.request.height, plan.request.width, plan.request.hidden_frames) == (64, 96, FRAMES)
    assert set(pipe.runtime.model.spec.list_components(plan.request)) >= {"clip_encoder", "audio_encoder"}
    conditioning = pipe.encode(plan)
    [size] = measuring.measure(pipe.runtime.model.config, plan.request)
    assert (size.latents, size.voices) == ((LATENTS, 4, 6), 36)
    as_reference = pipe.encode(pipe.plan(GenerationRequest(prompt="on", references=[f"video:{path}"], steps=1, **SIZE)))
    assert conditioning.prompt["text"].shape[1] < as_reference.prompt["text"].shape[1]  # No frame is read as text.
    video = pipe.generate(request)
    assert video.pixels.shape == (107, 64, 96, 3) and video.tail is not None


def test_an_end_comes_back_from_its_file(first):
    tail = first[0].tail
    again = parse_tail(tail.dump(), "it")
    for name in ("latents", "sound"):
        np.testing.assert_array_equal(getattr(again, name), getattr(tail, name))
    assert (again.digest, str(again)) == (tail.digest, str(tail)) and again.frames - again.blended == 17
    with pytest.raises(InvalidRequest) as refused:
        parse_tail(tail.dump()[:-5], "it")
    assert refused.value.field == "references"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"frames": 107, "height": 96, "width": 64}, "size"),
        ({"preset": "turbo-4"}, "preset"),
        ({"references": [("tail", 22), ("image", 1)]}, "references"),
        ({"references": [("tail", 21)]}, "references"),
        ({"references": [("tail", 22), ("goal", 22), ("goal", 22)]}, "references"),
        ({"references": [("tail", 22), ("soundtrack", 0)]}, "references"),
        ({"reference_size": "match"}, "reference_size"),
    ],
)
def test_what_the_model_can_not_continue_is_refused(fields, field):
    kinds = fields.get("references", [("tail", 22)])
    references = [Reference(kind, None, 64, 96, frames, 29333, 32000) for kind, frames in kinds]
    with pytest.raises(InvalidRequest) as refused:
        PUBLISHED.plan(GenerationRequest(prompt="a", **fields | {"references": references}))
    assert refused.value.field == field


@pytest.mark.long
def test_a_take_of_a_segment_ends_as_the_other_did(pipe, first, second):
    """So what goes on from the first take goes on from the second."""
    third = make(pipe, "it lies there", 5, second[0].tail)[0]
    goal = dataclasses.replace(parse_reference(second[0].tail), kind="goal")
    again, state = make(pipe, "it flies", 9, first[0].tail, goal)
    np.testing.assert_allclose(again.tail.latents, second[0].tail.latents, atol=1e-5)
    assert not np.allclose(np.asarray(state.latents), np.asarray(second[1].latents), atol=0.1)
    shown = 107 - FRAMES + BLENDED  # From here on, its last clip is that of the first take.
    np.testing.assert_allclose(again.pixels[shown:], second[0].pixels[shown:], atol=1e-4)
    begin, end = (round(frames / 24 * 32000) for frames in (107 - FRAMES, 107 - BLENDED))
    blend = begin + round(BLENDED / 24 * 32000)
    np.testing.assert_array_equal(again.audio[:, blend:end], second[0].audio[:, blend:end])
    whole = dataclasses.replace(again, tail=second[0].tail).join(third)
    assert len(whole.pixels) == 2 * 107 - FRAMES
    plan = pipe.plan(GenerationRequest(prompt="it flies", steps=1, seed=9, references=[first[0].tail, goal], **SIZE))
    model, conditioning = pipe.runtime.model, pipe.encode(plan)
    places = model.constants(plan.request, model.spec.latent_shape(plan.request), conditioning.prompt)["places"]
    count, tokens = int(conditioning.prompt["count"][0, 0]), LATENTS * 2 * 3
    voices, sound = 2 * 2 * 36, 2 * round(107 / 24 * 40)
    video = places[count + 2 * tokens + voices + sound :][: 32 * 6]
    np.testing.assert_array_equal(places[count + tokens :][:tokens], video[-tokens:])


def test_a_soundtrack_is_kept_and_followed(pipe, folder, tmp_path):
    song = write_sound(tmp_path / "song.wav", 3.001, rate=16000)
    request = GenerationRequest(prompt="it rings", steps=1, seed=4, references=[f"soundtrack:{song}"], **SIZE)
    plan, states, model = pipe.plan(request), [], pipe.runtime.model
    video = pipe.generate(request, on_step=lambda event: states.append(event.state))
    samples, rate = read_sound(song, 10)
    expected = measuring.resample(np.concatenate([samples, samples]), rate, 32000)
    assert video.audio.shape == (2, round(107 / 24 * 40) * 800)
    np.testing.assert_array_equal(video.audio[:, : expected.shape[1]], expected)
    assert not video.audio[:, expected.shape[1] :].any()
    np.testing.assert_array_equal(pipe.decode_sound(states[-1], plan.request)[0], video.audio)
    conditioning, state = pipe.encode(plan), pipe.initial_state(plan)
    track = conditioning.image_latents[0, :, :16]
    assert track.shape == state.audio[0].shape and track.std() > 0.1
    theirs, _ = predict_theirs(folder, model, plan, conditioning, state, track)
    latents = torch.tensor(np.asarray(states[-1].latents))
    assert relative(reference.patchify_video_latents(latents, PATCH), theirs) < 1e-4
    with pytest.raises(InvalidRequest) as refused:
        pipe.plan(dataclasses.replace(request, references=[f"soundtrack:{song}"] * 2))
    assert refused.value.field == "references"
