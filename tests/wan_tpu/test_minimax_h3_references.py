"""References of MiniMax-H3, stage by stage and as a whole, against diffusers' Ref2VA blocks."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import before_encoder

from tests.children import run_on_devices
from tests.wan_tpu import adapter_files
from tests.wan_tpu.minimax_h3_ref2va import RATE, ReferencePipeline, draw_image, to_theirs, write_sound, write_video
from tests.wan_tpu.minimax_h3_reference import relative
from wan_tpu import GenerationRequest, InvalidRequest, load_pipeline
from wan_tpu.aot.programs import AbstractRuntime, stage_programs
from wan_tpu.families import open_spec, published_spec
from wan_tpu.families.minimax_h3 import references as measuring
from wan_tpu.families.minimax_h3.small import make_checkpoint
from wan_tpu.families.shared.tokens import patchify
from wan_tpu.reference import Reference, restore_references
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.mesh import make_mesh

SIZE = {"height": 64, "width": 96, "frames": 107}
STEPS, SEED = 2, 7
PUBLISHED = published_spec("minimax-h3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("h3") / "model")


@pytest.fixture(scope="module")
def theirs(folder):
    return ReferencePipeline(folder)


@pytest.fixture(scope="module")
def pipe(folder):
    return load_pipeline(folder, dtype="float32")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """References by the names that the tests use."""
    folder = tmp_path_factory.mktemp("files")
    return {
        "picture": {"kind": "image", "source": draw_image(1, 50, 40)},
        "wide picture": {"kind": "image", "source": draw_image(2, 40, 130)},
        "video": f"video:{write_video(folder / 'a.mp4', 26)}",
        "silent video": f"video:{write_video(folder / 'b.mp4', 31, height=96, width=64, sound=False)}",
        "fast video": f"video:{write_video(folder / 'c.mp4', 60, fps=30)}",
        "sound": f"audio:{write_sound(folder / 'a.wav', 1.003)}",
        "long sound": f"audio:{write_sound(folder / 'b.wav', 6)}",
    }


@pytest.mark.parametrize(
    "names",
    [
        ("video", "picture"),
        pytest.param(("sound", "wide picture", "video", "picture"), marks=pytest.mark.thorough),
        pytest.param(("long sound", "fast video", "silent video"), marks=pytest.mark.thorough),
    ],
    ids=["video with sound, image", "sound, image, video, image", "sound, videos"],
)
def test_same_rows_and_latents_as_diffusers(names, files, pipe, theirs):
    request = GenerationRequest(
        prompt="Picture 1 sings.", steps=STEPS, seed=SEED, references=[files[name] for name in names], **SIZE
    )
    inputs = {"prompt": request.prompt, "num_frames": 107, "height": 64, "width": 96}
    state = theirs.run(steps=STEPS, seed=SEED, references=request.references, **inputs)
    plan, states = pipe.plan(request), []
    conditioning, start = pipe.encode(plan), pipe.initial_state(plan)
    pipe.denoise(plan, conditioning, start, on_step=lambda event: states.append(event.state))
    check_text(conditioning.prompt, state)
    check_rows(pipe, plan, conditioning, state)
    conditions = state.get("num_condition_video_rows"), state.get("num_condition_audio_rows")
    assert all(conditions[: 1 + any("sound" in name or name == "video" for name in names)])
    for ours, rows, audio in zip(states, theirs.steps["video"], theirs.steps["sound"], strict=True):
        assert relative(patchify(np.asarray(ours.latents), (1, 2, 2)), rows) < 1e-4
        assert relative(np.asarray(ours.audio)[0], audio) < 1e-4


@pytest.mark.thorough
def test_few_steps_are_those_of_diffusers_with_the_adapter(files, pipe, theirs, tmp_path):
    """LightX2V's files for references are of the transformer for references, and have an alpha in their header."""
    transformer = theirs.pipeline.transformer_ref
    state = {name: value.clone() for name, value in transformer.state_dict().items()}
    linear = [name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)]
    names = [name for name in linear if re.search(r"blocks\.\d+\.(attn|ff)\.", name)]
    pairs = adapter_files.factors(transformer, names, rank=16, scale=2)
    tensors = adapter_files.name_tensors(pairs, {name: name for name in names}, "", "lora_A.default", "lora_B.default")
    path = adapter_files.save(tensors, tmp_path / "turbo.safetensors", metadata={"alpha": "8"})
    settings = dict(PUBLISHED.presets["turbo-4-references"].settings) | {"loras": [path]}
    request = GenerationRequest(prompt="Picture 1 sings.", seed=SEED, references=[files["picture"]], **SIZE, **settings)
    inputs = {"prompt": request.prompt, "num_frames": 107, "height": 64, "width": 96}
    states, plain = [], []
    for adapted in (True, False):
        if adapted:
            transformer.load_state_dict(adapter_files.by_hand(state, pairs, 8 / 16))
        try:
            theirs.run(steps=4, seed=SEED, references=request.references, **inputs)
        finally:
            transformer.load_state_dict(state)
        (states if adapted else plain).extend(theirs.steps["video"])
    ours, plan = [], pipe.plan(request)
    conditioning, start = pipe.encode(plan), pipe.initial_state(plan)
    pipe.denoise(plan, conditioning, start, on_step=lambda e: ours.append(patchify(np.asarray(e.latents), (1, 2, 2))))
    assert len(ours) == len(states) == 4
    for actual, expected in zip(ours, states, strict=True):
        assert relative(actual, expected) < 1e-4
    assert relative(ours[-1], plain[-1]) > 1e-2


def check_text(prompt, state):
    """Compare the text's embeddings, whose rows of images and videos come first."""
    [order], [[count]] = prompt["positions"], prompt["count"]
    embedded, tags = state.get("prompt_embeds")[0].numpy(), state.get("text_token_tags").numpy()
    assert count == len(embedded) and sorted(order[:count]) == list(range(count))
    assert relative(prompt["text"][0, :count], embedded[order[:count]]) < 1e-5
    assert (np.diff(tags[order[:count]]) >= 0).all() and set(tags) == {0, 1}  # Those of images, then words.


def check_rows(pipe, plan, conditioning, state):
    """Compare rows and positions of references."""
    model, request = pipe.runtime.model, plan.request
    measures = measuring.measure(model.config, request)
    room, (visible, voices) = measuring.find_room(model.config, measures), measuring.count_rows((1, 2, 2), measures)
    ours, expected = conditioning.image_latents[0, :visible], state.get("condition_rows").numpy()
    # Latents are rounded to float16, so that a rounding error of the encoder may become one of these.
    assert relative(ours, expected) < 2**-9 and np.mean(np.abs(ours - expected) > 1e-4) < 0.01
    if rows := state.get("audio_condition_latents"):
        ours = conditioning.image_latents[0, room.visible : room.visible + voices, :16]
        assert relative(ours, np.concatenate(rows)) < 1e-5
    places = model.constants(request, model.spec.latent_shape(request), conditioning.prompt)["places"]
    [order], [[count]] = conditioning.prompt["positions"], conditioning.prompt["count"]
    theirs = state.get("position_ids").numpy()
    video, audio = state.get("video_indices").numpy(), state.get("audio_indices").numpy()
    parts = [order[:count], video[:visible], audio[:voices], audio[voices:], video[visible:]]
    np.testing.assert_array_equal(places[: len(theirs)], theirs[np.concatenate(parts)].astype(np.float32))


@pytest.mark.meshes
@pytest.mark.thorough
def test_eight_devices_give_what_one_gives(folder, files, tmp_path):
    draw_image(3, 60, 70).save(tmp_path / "picture.png")
    references = [files["video"], f"image:{tmp_path / 'picture.png'}", files["sound"]]
    fields = {"prompt": "Picture 1 sings.", "steps": STEPS, "seed": SEED, "references": references, **SIZE}
    run_on_devices("tests.wan_tpu.whole_run_worker", folder, json.dumps(fields), tmp_path / "out.npz", count=8)
    results = dict(np.load(tmp_path / "out.npz"))
    for part in (f"latents {STEPS}", f"sound {STEPS}"):
        first, *others = (value for name, value in results.items() if name.endswith(part))
        assert others and all(relative(other, first) < 1e-4 for other in others)


def measure(*references, **fields):
    spec = PUBLISHED
    request = GenerationRequest(prompt="a", references=list(references), **fields).resolve(spec.defaults)
    return measuring.measure(spec.config, request)


@pytest.mark.parametrize(("height", "width"), [(1080, 1920), (500, 499), (3000, 800), (64, 256)])
def test_images_and_videos_have_diffusers_sizes(height, width):
    image = Reference("image", None, height, width)
    [size] = measure(image)
    short = 2048 / min(height, width)
    assert (size.height, size.width) == (round(height * short / 32) * 32, round(width * short / 32) * 32)
    [size] = measure(Reference("video", None, height, width, 48))
    expected = before_encoder.resolve_canvas_size(width, height, 32, 768, 768 * 1344)
    assert (size.height, size.width) == expected
    [size] = measure(image, reference_size="match")
    assert size.height * size.width <= 1.1 * 768 * 1344
    assert size.height <= height + 16 and size.width <= width + 16


@pytest.mark.parametrize("fps", [12.5, 23.976, 30, 60])
def test_frames_are_repeated_and_dropped_as_diffusers_does(fps, tmp_path):
    file = write_video(tmp_path / "a.mp4", 40, fps=fps, sound=False)
    [reference] = GenerationRequest(references=[f"video:{file}"]).references
    expected = before_encoder.MiniMaxH3Ref2VASetupStep._normalize_video_condition(
        *(getattr(to_theirs(reference), name) for name in ("frames", "fps")), 107, 32, 64, 64 * 96, 24.0
    )
    assert abs(len(expected) - reference.frames) <= 1  # ffmpeg decides about the last frame by how long it is shown.
    frames = measuring.read_clip(str(file), fps=24, height=64, width=96, count=len(expected))
    np.testing.assert_array_equal(frames[: len(expected)], expected[: len(frames)])


# fmt: off
RESAMPLED = {  # By torchaudio 2.11.1's functions: every 80th of 640 samples.
    44100: [-0.0299286, 0.0521825, -1.3906732, -0.8117435, 1.0578723, -0.1404499, 1.9486961, -1.5504867],
    48000: [-0.0567276, 1.0503172, 0.7731325, -0.3482626, 1.4405318, -0.9603758, 0.6324351, -0.399312],
    8000: [0.1205884, -0.1040469, -1.2301035, -0.4542136, 0.2056095, 0.4938897, 0.7835513, 0.370526],
}
# fmt: on


@pytest.mark.parametrize("rate", RESAMPLED)
def test_sound_at_another_rate_is_that_of_torchaudio(rate):
    draws = np.random.default_rng(0).standard_normal(rate // 50).astype(np.float32)
    resampled = measuring.resample(np.stack([draws, -draws]), rate, RATE)
    assert resampled.shape == (2, 640) == (2, measuring.count_resampled(len(draws), rate, RATE))
    np.testing.assert_allclose(resampled[0, ::80], RESAMPLED[rate], atol=2e-6)
    np.testing.assert_array_equal(resampled[1], -resampled[0])


@pytest.mark.parametrize(
    ("references", "fields", "numbers"),
    [
        ([("image", 50, 50)] * 10, {}, ("10", "9")),
        ([("audio",)], {}, ()),
        ([("image", 100, 401)], {}, ("1:4", "4:1")),
        ([("video", 64, 64, 21)], {}, ("21", "22")),
        ([("image", 1080, 1920)] * 5, {}, ("36490", "32768", "first 4", "29192", "match", "5050")),
        ([("video", 64, 64, 48)], {"preset": "turbo-4"}, ("turbo-4", "turbo-4-references", "turbo-8-references")),
        ([], {"preset": "turbo-8-references"}, ("turbo-8-references", "none")),
        ([("image", 64, 64)], {"image": draw_image(0, 64, 64)}, ("image",)),
    ],
)
def test_what_the_model_can_not_read_is_refused_before_anything_is_computed(references, fields, numbers):
    sound = {"samples": 9, "sample_rate": 9}
    made = [Reference(kind, None, *sizes, **(sound if kind == "audio" else {})) for kind, *sizes in references]
    with pytest.raises(InvalidRequest) as refused:
        PUBLISHED.plan(GenerationRequest(prompt="a", references=made or None, **fields))
    assert refused.value.field in ("references", "preset")
    assert all(number in str(refused.value) for number in numbers)


@pytest.mark.parametrize(
    ("reference", "fields", "warned"),
    [
        (("image", 1080, 1920), {}, 0),
        (("image", 50, 50), {}, 0),
        (("image", 250, 300), {"reference_size": "match"}, 1),  # 288x256
        (("video", 1440, 3440, 48), {}, 1),  # 1568x672, by 2.4 %
        (("video", 1080, 1920, 48), {}, 0),
    ],
)
def test_a_reference_is_stretched_by_two_percent_at_most_without_a_warning(reference, fields, warned):
    kind, *sizes = reference
    references = [Reference("audio", None, samples=9000, sample_rate=3000), Reference(kind, None, *sizes)]
    plan = PUBLISHED.plan(GenerationRequest(prompt="a", references=references, **fields))
    assert [warning.split(" is ")[0] for warning in plan.warnings] == ["reference 2"] * warned


def test_a_checkpoint_without_their_transformer_makes_all_other_videos(folder, files, tmp_path):
    """It is 66 GB of the published one; what other requests need is all that is read."""
    bare = tmp_path / "model"
    bare.mkdir()
    for part in folder.iterdir():
        if part.name != "transformer_ref":
            (bare / part.name).symlink_to(part)
    spec = open_spec(bare)
    spec.plan(GenerationRequest(prompt="a", **SIZE))
    with pytest.raises(InvalidRequest) as refused:
        spec.plan(GenerationRequest(prompt="a", references=[files["picture"]], **SIZE))
    assert refused.value.field == "references"


@pytest.mark.thorough
def test_requests_read_only_the_weights_that_they_need(folder, files):
    pipe = load_pipeline(folder, dtype="float32")
    request = GenerationRequest(prompt="a", steps=1, references=[files["picture"]], **SIZE)
    pipe.generate(request)
    loaded = set(pipe.runtime._components)
    assert "denoise_ref" in loaded and not loaded & {"denoise", "audio_encoder", "clip_encoder"}
    pipe.generate(dataclasses.replace(request, references=None))
    assert "denoise" in pipe.runtime._components


def test_a_request_comes_back_from_json_with_its_measures(files, pipe):
    """Plans, stages in processes of their own and jobs store it so."""
    plan = pipe.plan(GenerationRequest(prompt="a", references=[files["picture"], files["video"]], **SIZE))
    request = plan.request.without_files()
    again = ResolvedRequest(**restore_references(json.loads(json.dumps(plan.request.to_json() | {"loras": []}))))
    assert again.references == request.references and again.references[1].samples > 0
    assert pipe.runtime.model.spec.plan_resolved(again, image=False).shapes == plan.shapes
    assert hash(request) == hash(again)


@pytest.mark.parametrize("name", ["video", "sound"])
def test_a_file_whose_sound_has_changed_since_it_was_measured_is_refused(name, files, pipe):
    request = pipe.plan(GenerationRequest(prompt="a", references=[files["picture"], files[name]], **SIZE)).request
    picture, sound = request.references
    shorter = dataclasses.replace(request, references=(picture, dataclasses.replace(sound, samples=sound.samples // 2)))
    pipe.runtime.model.read_references(request)
    with pytest.raises(InvalidRequest) as refused:
        pipe.runtime.model.read_references(shorter)
    assert refused.value.field == "references"


@pytest.mark.parametrize(
    "reference",
    [
        {"kind": "image", "source": "/nowhere.png", "height": 512, "width": 512},  # As records have it.
        {"kind": "tail", "height": 64, "width": 96, "frames": 22},
        {"kind": "foo", "source": "a.png"},
        {"kind": "image"},
    ],
)
def test_a_reference_without_its_file_is_refused(reference):
    with pytest.raises(InvalidRequest) as refused:
        PUBLISHED.plan(GenerationRequest(prompt="a", references=[reference]))
    assert refused.value.field == "references"


@pytest.mark.thorough
def test_programs_of_references_are_known_ahead(files, pipe):
    """Their shapes follow from the measures: files aren't read, and few sizes of rows serve all references."""
    plan = pipe.plan(GenerationRequest(prompt="a", references=[files["picture"], files["video"]], **SIZE))
    request = plan.without_image().request
    runtime = AbstractRuntime(pipe.runtime.model, make_mesh((1, 1, 1), heads=8), "float32")
    programs = stage_programs(runtime, request, ("encoder", "denoise_ref"))
    assert sum("clip_encoder" in name for name in programs) == 1
    conditioning = pipe.encode(plan)
    _, arguments, _ = programs["denoise step"]
    assert arguments[3][1].shape == conditioning.image_latents.shape
    other = pipe.plan(GenerationRequest(prompt="a", references=[files["video"], files["wide picture"]], **SIZE))
    assert plan.shapes["denoise_ref"] == other.shapes["denoise_ref"] and plan.shapes != other.shapes


def test_presets_for_references_are_for_these_alone():
    image = Reference("image", None, 768, 1344)
    plan = PUBLISHED.plan(GenerationRequest(prompt="a", references=[image], preset="turbo-8-references"))
    assert plan.steps == 8 and any("match" in warning for warning in plan.warnings)
    assert not PUBLISHED.plan(
        GenerationRequest(prompt="a", references=[image], preset="turbo-8-references", reference_size="match")
    ).warnings
    [typical] = PUBLISHED.typical_requests(GenerationRequest(preset="turbo-4-references"))
    assert [reference.kind for reference in typical.references] == ["image"]
    # Without their transformer the request stays, and is refused when it is planned.
    [left] = PUBLISHED.limit_to(["denoise"]).typical_requests(GenerationRequest(preset="turbo-4-references"))
    assert left.references is None
    kinds = [[one.kind for one in each.references or ()] for each in PUBLISHED.typical_requests(GenerationRequest())]
    assert kinds == [[], ["image"], ["tail"]]
    with pytest.raises(InvalidRequest) as refused:
        end = Reference("tail", None, 64, 96, 22, 29333, 32000)
        PUBLISHED.plan(GenerationRequest(prompt="a", references=[end], preset="turbo-8-references"))
    assert refused.value.field == "preset"
