"""LTX-2 in two stages with guidance: what the preset plans, what it needs, and what it refuses."""

import dataclasses

import numpy as np
import pytest

from scripts.published.ltx_rules import make_adapter
from tests.conftest import PHOTO
from tests.wan_tpu.minimax_h3_ref2va import write_sound
from wan_tpu.aot.precompile import precompile
from wan_tpu.aot.programs import RANK
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.data import DenoiseState, load_value, save_value
from wan_tpu.errors import InvalidRequest
from wan_tpu.families import published_spec
from wan_tpu.families.ltx2.published import SECOND_STAGE_SIGMAS, TWO_STAGES
from wan_tpu.families.model import open_model
from wan_tpu.pipeline import load_pipeline
from wan_tpu.plan import AUDIO, VIDEO, Expert
from wan_tpu.request import GenerationRequest
from wan_tpu.runtime.mesh import make_mesh
from wan_tpu.schedules.flow import euler_ancestral_at, euler_at

GUIDED = ("ltx-2", "ltx-2.3", "ltx-2.5")
SPEC = published_spec("ltx-2.3")


def plan(spec=SPEC, picture=None, **fields):
    request = GenerationRequest(**{"prompt": "a cat", "preset": TWO_STAGES} | fields)
    return spec.plan(request, image=picture is not None, picture=picture)


@pytest.mark.parametrize("kind", GUIDED)
def test_second_stage_has_three_steps_without_guidance_at_twice_the_size(kind):
    spec = published_spec(kind)
    first, made = spec.defaults, plan(spec)
    request = made.request
    assert (request.height, request.width, request.steps) == (2 * first.height, 2 * first.width, first.steps + 3)
    assert made.experts == (
        Expert("denoise", 0, first.steps, guided=True),
        Expert("refine", first.steps, request.steps, guided=False, enlarges=True),
    )
    assert made.prompts == (request.prompt, first.negative_prompt)
    assert [spec.count_evaluations(request, expert) for expert in made.experts] == [4, 1]
    one = spec.plan(GenerationRequest(prompt="a cat"))
    before, after = (spec.latent_shapes(request, step)[VIDEO] for step in (first.steps, request.steps))
    assert before == spec.latent_shapes(one.request, 0)[VIDEO]
    assert after[3:] == tuple(2 * side for side in before[3:])
    levels = spec.schedule(request).sigmas
    assert np.array_equal(levels[:-3], spec.schedule(one.request).sigmas)
    assert np.array_equal(levels[-3:], np.float32(SECOND_STAGE_SIGMAS))


def test_distilled_adapter_is_for_the_second_stage_alone():
    made = plan()
    assert not made.request.adapters_for("denoise")
    [adapter] = made.request.adapters_for("refine")
    assert "distilled-lora" in adapter.path
    assert not made.adapts_text
    both = plan(loras=["style", "distilled:0.8@refine"])
    assert [adapter.path for adapter in both.request.adapters_for("denoise")] == ["style"]
    assert [adapter.path for adapter in both.request.adapters_for("refine")] == ["style", "distilled"]
    assert both.adapts_text


@pytest.mark.parametrize(
    ("fields", "picture", "size"),
    [
        ({}, (600, 600), (1216, 1216)),
        ({"height": 704}, (600, 600), (704, 704)),
        ({"height": 704}, None, (704, 1536)),
        ({"height": 128, "width": 64}, (600, 600), (128, 64)),
    ],
)
def test_size_follows_an_image_in_multiples_of_64(fields, picture, size):
    request = plan(picture=picture, **fields).request
    assert (request.height, request.width) == size


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"loras": []}, "loras"),
        ({"loras": ["style"]}, "loras"),
        ({"loras": ["style@high"]}, "loras"),
        ({"steps": 3}, "steps"),
        ({"sigmas": [1.0, 0.5]}, "sigmas"),
        ({"height": 96}, "height"),
        ({"preset": None, "loras": ["distilled@refine"]}, "loras"),
    ],
)
def test_what_contradicts_two_stages_is_refused(fields, field):
    with pytest.raises(InvalidRequest) as refused:
        plan(**fields)
    assert refused.value.field == field


def test_checkpoint_or_layout_without_the_second_stage_says_so():
    lacking = SPEC.limit_to({"encoder", "denoise", "decoder"})
    assert lacking.config.upsampler is None
    assert TWO_STAGES not in lacking.presets
    with pytest.raises(InvalidRequest, match="latent_upsampler") as refused:
        plan(lacking)
    assert refused.value.field == "preset"
    assert SPEC.limit_to(SPEC.components) == SPEC


def test_distilled_models_keep_both_stages_in_every_layout():
    spec = published_spec("ltx-2.3-distilled")
    assert not spec.optional_stages
    assert TWO_STAGES not in spec.presets
    adapted = plan(spec, preset=None, loras=["style@refine"]).request
    assert not adapted.adapters_for("denoise")
    with pytest.raises(InvalidRequest):
        plan(spec, preset=None, loras=["style@refine"], steps=8)


def test_resolved_request_is_planned_the_same_again():
    made = plan(picture=(600, 600), steps=9)
    assert SPEC.plan(GenerationRequest(**made.request.to_json()), image=True).request == made.request


def test_sound_of_ltx_25_is_the_first_stages():
    for kind in GUIDED:
        schedules = published_spec(kind).schedules(plan(published_spec(kind)).request)
        assert schedules[AUDIO].history_terms == int(kind == "ltx-2.5")
        assert schedules[VIDEO].history_terms == 0


@pytest.mark.parametrize("make", [euler_at, euler_ancestral_at])
def test_a_kept_result_is_that_of_the_first_steps_while_all_of_them_run(make):
    levels, random = (1.0, 0.7, 0.4, 0.9, 0.5), np.random.default_rng(0)
    schedule = make(levels)
    kept = schedule.keep_result(3)
    assert (kept.steps, kept.history_terms, kept.noise_terms) == (5, 1, schedule.noise_terms)
    x = y = random.standard_normal()
    history = 0.0
    for step in range(5):
        clean, noise = random.standard_normal(), random.standard_normal(schedule.noise_terms)
        [x] = schedule.matrices[step] @ [x, clean, *noise]
        y, history = kept.matrices[step] @ [y, clean, history, *noise]
        if step < 4:
            assert y == pytest.approx(x)
        if step == 2:
            result = y
    assert y == result


@pytest.mark.thorough
@pytest.mark.parametrize("talks", [False, True])
def test_all_programs_that_run_can_be_compiled_ahead(talks, checkpoint, tmp_path):
    folder = checkpoint("ltx-2.3")
    adapter = make_adapter(folder, tmp_path / "distilled.safetensors", rank=RANK)
    request = GenerationRequest(
        prompt="a cat", preset=TWO_STAGES, loras=[f"{adapter}@refine"], steps=5, height=64, width=128, frames=9
    )
    if talks:
        song = write_sound(tmp_path / "song.wav", 0.4, rate=16000)
        request = dataclasses.replace(request, image=PHOTO, references=[f"soundtrack:{song}"])
    model = open_model(Checkpoint(folder))
    mesh = make_mesh((1, 1, 1), heads=model.spec.heads)
    done = list(precompile(model, model.spec.plan(request).request, mesh, "float32", tmp_path / "programs"))
    assert len(done) == len({program.name for program in done})
    pipe = load_pipeline(folder, "float32", mesh=(1, 1, 1), executables=tmp_path / "programs")
    pipe.generate(request)
    assert not [name for name, program in pipe.runtime.programs.items() if program.compile_s]


@pytest.mark.thorough
def test_video_in_the_least_memory_and_a_resumed_one_are_the_same(checkpoint, tmp_path):
    """Each stage has adapters of its own, and the sound of LTX-2.5 waits for the second stage."""
    folder = checkpoint("ltx-2.5")
    style, distilled = (make_adapter(folder, tmp_path / f"{seed}.safetensors", seed=seed) for seed in (1, 2))
    request = GenerationRequest(
        prompt="a cat",
        preset=TWO_STAGES,
        loras=[str(style), f"{distilled}@refine"],
        steps=5,
        height=64,
        width=128,
        frames=9,
    )
    pipe = load_pipeline(folder, "float32", mesh=(1, 1, 1))
    made, saved = pipe.plan(request), tmp_path / "state.safetensors"
    conditioning = pipe.encode(made, warn=lambda _: None)
    whole = pipe.denoise(made, conditioning, pipe.initial_state(made))
    for stop in (2, 4):  # Between both stages, and within the second one.
        save_value(pipe.denoise(made, conditioning, pipe.initial_state(made), stop=stop), saved)
        state, _ = load_value(DenoiseState, saved)
        assert_same(pipe.denoise(made, conditioning, state), whole)
    small = load_pipeline(folder, "float32", mesh=(1, 1, 1), keep_weights=False)
    assert_same(small.denoise(made, conditioning, small.initial_state(made)), whole)


def assert_same(state, other):
    assert np.array_equal(state.latents, other.latents)
    assert np.array_equal(state.audio, other.audio)
