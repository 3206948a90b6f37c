"""Which steps take equally long, so that a slice on which one hangs is noticed."""

import dataclasses

import pytest

from actors.slices.stage_runner import find_step_kind
from scripts.simulation.simulated import MODEL
from tests.conftest import PHOTO
from wan_tpu import GenerationRequest
from wan_tpu.stage_machine import Step

REQUEST = GenerationRequest(prompt="A cat", image=PHOTO, height=64, width=64, frames=9, steps=20, shift=5.0)


@pytest.mark.parametrize("guidance_scale", [1.0, 3.5])
@pytest.mark.parametrize("cache", [None, "magcache"])
def test_steps_that_skip_their_blocks_are_of_another_kind(cache, guidance_scale):
    plan = MODEL.plan(dataclasses.replace(REQUEST, cache=cache, guidance_scale=guidance_scale))
    steps = [Step(plan.expert_at(index), index) for index in range(plan.steps)]
    work = [(step.stage, step.index + 1 in MODEL.skipped_steps(plan.request)) for step in steps]
    kinds = [find_step_kind(plan, step, begins=step.index == step.expert.start) for step in steps]
    assert len(set(zip(work, kinds, strict=True))) == len(set(work)) == len(set(kinds)) == (4 if cache else 2)


def test_first_step_after_a_resumption_finds_nothing_to_reuse():
    plan = MODEL.plan(dataclasses.replace(REQUEST, cache="magcache"))
    index = MODEL.skipped_steps(plan.request)[0] - 1
    step = Step(plan.expert_at(index), index)
    assert find_step_kind(plan, step, begins=True) != find_step_kind(plan, step, begins=False)
