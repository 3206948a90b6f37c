"""A request of which something has no effect is planned with a warning that says so."""

import re

import pytest
from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5 as reference

from wan_tpu.families import published_spec
from wan_tpu.reference import Reference
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


@pytest.mark.parametrize(
    ("prompt", "warnings"),
    [
        ("A cat.", 0),
        ('A sign says "OPEN", below it “Café”, and "ROUTE 66".', 0),
        ('“He said "hi"” on a wall', 0),
        ('a 24" monitor shows "HELLO"', 2),  # 24" and "HELLO are a pair, and the last mark is alone.
        ('a sign "OPEN" between a 24" screen and a 12" one', 1),
        ('a sign says "OPEN', 1),
        ('a sign says "OPEN\nALL NIGHT"', 1),
        ("a sign says “OPEN", 1),
    ],
)
def test_quotation_marks_that_may_not_mean_lettering_are_answered_with_a_warning(prompt, warnings):
    """What counts as lettering is diffusers' rule."""
    spec = published_spec("hunyuanvideo1.5-480p-t2v")
    found = spec.plan(GenerationRequest(prompt=prompt, negative_prompt=prompt)).warnings
    assert len(found) == 2 * warnings and all("negative_prompt" in text for text in found[warnings:])
    assert len(spec.plan(GenerationRequest(prompt=prompt, guidance_scale=1.0)).warnings) == warnings
    rest = reference.extract_glyph_texts(prompt) or ""
    assert ("Text" in rest) == bool(re.search(r'".*"|“.*”', prompt))


@pytest.mark.parametrize(("seconds", "warnings"), [(4, 1), (4.97, 0), (5.1, 0), (6, 1)])
def test_soundtrack_of_another_length_than_the_video_is_answered_with_a_warning(seconds, warnings):
    track = Reference("soundtrack", None, samples=int(seconds * 8000), sample_rate=8000)
    request = GenerationRequest(prompt="a cat", references=[track], frames=121)  # 5.04 s.
    assert len(published_spec("ltx-2.3").plan(request).warnings) == warnings
