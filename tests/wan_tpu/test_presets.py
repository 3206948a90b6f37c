"""Presets, explicit sigmas and the switch by index: what a request resolves to, and which expert runs which steps."""

import argparse
import dataclasses
import itertools

import pytest

from wan_tpu import GenerationRequest
from wan_tpu.commands import staged
from wan_tpu.commands.arguments import SAMPLING
from wan_tpu.errors import InvalidRequest
from wan_tpu.families import published_spec
from wan_tpu.request import CheckpointOverrides, Preset, ResolvedRequest

A14B = published_spec("wan2.2-i2v-a14b")


def plan(spec=A14B, **fields):
    return spec.plan(GenerationRequest(**fields), image="i2v" in spec.tasks)


def test_lightning_is_four_unguided_steps_two_on_each_expert():
    lightning = plan(preset="lightning", prompt="a cat")
    request = lightning.request
    assert (request.steps, request.solver, request.guidance_scale, request.guidance_scale_2) == (4, "euler", 1, 1)
    assert [(e.stage, e.start, e.stop, e.guided) for e in lightning.experts] == [
        ("denoise_high", 0, 2, False),
        ("denoise_low", 2, 4, False),
    ]
    assert lightning.prompts == ("a cat",)
    (high,), (low,) = request.adapters_for("denoise_high"), request.adapters_for("denoise_low")
    assert "high_noise" in high.path and "low_noise" in low.path and high.scale == low.scale == 1
    assert request.frames == 81 and request.height == 720  # the model's own


@pytest.mark.parametrize(
    ("fields", "steps", "switch", "sigmas"),
    [
        ({"steps": 8}, 8, None, False),  # then both follow from the shift and the model's boundary
        ({"shift": 3.0}, 4, None, False),
        ({"shift": 5.0}, 4, 2, True),  # which is its own
        ({"steps": 4}, 4, 2, True),
        ({"sigmas": (1.0, 0.5)}, 2, None, True),
        ({"sigmas": (0.5,)}, 1, None, True),  # nobody asked for a switch after the second step
        ({"switch_step": 1}, 4, 1, True),
        ({"guidance_scale": 2.0}, 4, 2, True),
        ({"loras": []}, 4, 2, True),
    ],
)
def test_a_request_overrides_its_preset(fields, steps, switch, sigmas):
    request = plan(preset="lightning", **fields).request
    assert (request.steps, request.switch_step, request.sigmas is not None) == (steps, switch, sigmas)
    for name, value in fields.items():
        assert getattr(request, name) == (tuple(value) if isinstance(value, list) else value)
    if "guidance_scale" in fields:
        assert request.guidance_scale_2 == 2.0
    assert bool(request.loras) == ("loras" not in fields)
    if fields.keys() <= set(SAMPLING) - {"guidance_scale"}:  # Stage 2 may be given them as well.
        run = staged.Run("id", "checkpoint", "bfloat16", plan(preset="lightning").request, ())
        options = dict.fromkeys(SAMPLING) | {
            name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()
        }
        later = staged._with_overrides(run, argparse.Namespace(resume=False, **options)).request
        assert later == request


SETTINGS = [
    {},
    {"preset": "original"},
    {"preset": "lightning"},
    {"preset": "lightning", "sigmas": [0.9, 0.5]},
    {"sigmas": [0.9, 0.5]},
    {"preset": "lightning", "steps": 6},
    {"switch_step": 3},
]


@pytest.mark.parametrize("fields", SETTINGS + [settings | {"shift": 3.0} for settings in SETTINGS])
def test_a_resolved_request_stays_what_it_is(fields):
    """It is stored as JSON, and planned again by who makes the video."""
    resolved = plan(**fields).request
    again = A14B.plan(GenerationRequest(**resolved.to_json()), image=True)
    assert again.request == resolved
    assert ResolvedRequest(**resolved.to_json()) == resolved
    assert A14B.experts(resolved) == again.experts


def test_a_presets_guidance_is_of_both_experts():
    """As a request's is, and what a checkpoint's own wan_tpu.json says."""
    quick = Preset("for tests", "none", (("guidance_scale", 2.0),))
    spec = dataclasses.replace(A14B, overrides=CheckpointOverrides(presets=(("quick", quick),)))
    request = plan(spec, preset="quick").request
    assert (request.guidance_scale, request.guidance_scale_2) == (2.0, 2.0)
    assert plan(spec, preset="quick", guidance_scale_2=4.0).request.guidance_scale_2 == 4.0


def test_calls_are_routed_by_adapters_as_by_programs():
    """A slice that has merged them is the one to ask; the other expert's calls don't care."""
    plain, adapted = plan().shapes, plan(loras=["gs://b/x.safetensors:0.5@high"]).shapes
    assert adapted["denoise_high"] == f"{plain['denoise_high']} gs://b/x.safetensors:0.5@high"
    assert adapted["denoise_low"] == plain["denoise_low"]


def test_experts_switch_where_the_request_says():
    for steps, switch in itertools.product((1, 4, 7), (0, 1, 3)):
        if switch > steps:
            continue
        steps_by_stage = {e.stage: e.stop - e.start for e in plan(steps=steps, switch_step=switch).experts}
        assert steps_by_stage == {k: v for k, v in {"denoise_high": switch, "denoise_low": steps - switch}.items() if v}
        schedule = A14B.schedule(dataclasses.replace(plan(steps=steps).request, switch_step=switch, guidance_scale=9.0))
        assert schedule.guidance.tolist() == [9.0] * switch + [3.5] * (steps - switch)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"sigmas": []}, "sigmas", "decreasing"),
        ({"sigmas": [0.5, 0.9]}, "sigmas", "0.9.*0.5"),
        ({"sigmas": [1.1]}, "sigmas", "1.1"),
        ({"sigmas": [0.5, 0.0]}, "sigmas", r"\b0\b"),
        ({"sigmas": ["a"]}, "sigmas", "finite"),
        ({"sigmas": [0.5], "steps": 3}, "sigmas", "steps"),
        ({"switch_step": 5, "steps": 4}, "switch_step", r"\b0\b.*\b4\b"),
        ({"switch_step": -1}, "switch_step", r"\b0\b"),
        ({"sigmas": (1.0, 1e-50)}, "sigmas", r"sigmas.*1e-50.*\b1\b.*\b1\b.*0.000001"),
        ({"preset": "thunder"}, "preset", "lightning"),
        ({"preset": 3}, "preset", "string"),
    ],
)
def test_meaningless_settings_are_refused(fields, field, message):
    with pytest.raises(InvalidRequest, match=message) as raised:
        plan(**fields)
    assert raised.value.field == field


def test_models_without_such_settings_say_so():
    for name, fields in (
        ("wan2.1-t2v-1.3b", {"switch_step": 1}),
        ("cogvideox1.5-5b", {"sigmas": [1.0, 0.5]}),
        ("cogvideox1.5-5b", {"preset": "lightning"}),
    ):
        with pytest.raises(InvalidRequest) as raised:
            plan(published_spec(name), **fields)
        assert raised.value.field in fields
