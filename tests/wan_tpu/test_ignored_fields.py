"""A request of which something has no effect is planned with a warning that says so."""

import pytest

from wan_tpu.families import published_spec
from wan_tpu.request import GenerationRequest


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("minimax-h3", {}),
        ("ltx-2.3-distilled", {}),
        ("helios-distilled", {}),
        ("wan2.2-t2v-a14b", {"guidance_scale": 1.0}),
        ("wan2.2-t2v-a14b", {"preset": "lightning"}),
        ("cogvideox-5b", {"guidance_scale": 0.5}),
        ("hunyuanvideo1.5-480p-t2v-distilled", {}),
    ],
)
def test_negative_prompt_without_guidance_is_answered_with_a_warning(model, fields):
    spec = published_spec(model)
    plan = spec.plan(GenerationRequest(prompt="a cat", negative_prompt="dogs", **fields))
    assert [warning.split()[0] for warning in plan.warnings] == ["negative_prompt"]
    assert plan.prompts == ("a cat",)
    for negative in ("", None):
        assert spec.plan(GenerationRequest(prompt="a cat", negative_prompt=negative, **fields)).warnings == ()


@pytest.mark.parametrize("model", ["ltx-2.3", "helios-base", "wan2.2-t2v-a14b"])
def test_negative_prompt_that_is_read_is_no_reason_to_warn(model):
    plan = published_spec(model).plan(GenerationRequest(prompt="a cat", negative_prompt="dogs"))
    assert plan.warnings == () and plan.prompts == ("a cat", "dogs")
