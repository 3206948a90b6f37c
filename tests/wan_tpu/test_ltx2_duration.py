"""The length that LTX-2.5's duration head chooses, against diffusers' head and pipeline."""

import dataclasses

import diffusers
import jax
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2.duration_head import LTX2DurationHead

from tests.wan_tpu.test_ltx2_parity import OFF
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.data import dump_value, parse_value
from wan_tpu.errors import CheckpointError, InvalidInput, InvalidRequest
from wan_tpu.families import open_spec, published_spec
from wan_tpu.families.ltx2 import duration
from wan_tpu.families.ltx2.published import DISTILLED_SIGMAS
from wan_tpu.pipeline import load_pipeline
from wan_tpu.request import GenerationRequest
from wan_tpu.runtime.components import load_component
from wan_tpu.runtime.mesh import make_mesh
from wan_tpu.stage_machine import StageMachine

KIND = "ltx-2.5-distilled"
# At this rate, the small head's lengths are a few latent frames.
REQUEST = GenerationRequest(prompt="A cat purrs.", height=64, width=64, fps=32, steps=8, seed=3, preset="diffusers")


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(KIND)


@pytest.fixture(scope="module")
def spec(folder):
    return open_spec(folder)


@pytest.fixture(scope="module")
def pipe(folder):
    return load_pipeline(folder, "float32", mesh=(1, 1, 1))


@pytest.fixture(scope="module")
def theirs(folder):
    pipeline = diffusers.LTX2Pipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@torch.no_grad()
def test_seconds_are_those_of_diffusers_head(folder, spec):
    head = LTX2DurationHead.from_pretrained(folder / "duration_head").eval()
    widths = {stream: spec.text_width(stream) for stream in ("video", "audio")}
    component = duration.duration_head(spec.config.duration_head, widths)
    loaded = load_component(Checkpoint(folder), component, "float32", make_mesh((1, 1, 1), heads=4))
    generator, seconds = torch.Generator().manual_seed(0), []
    for scale in (0.1, 1.0, 3.0):
        video, audio = (scale * torch.randn(1, 1024, widths[stream], generator=generator) for stream in widths)
        ours = duration.predict_seconds(loaded, {"text": video.numpy(), "audio_text": audio.numpy()})
        assert np.asarray(ours) == pytest.approx(head(video, audio).numpy(), rel=1e-5)
        seconds.append(float(ours[0]))
    assert len({round(value, 3) for value in seconds}) == 3
    lowered = jax.jit(
        lambda *text: duration.predict_seconds(loaded, dict(zip(("text", "audio_text"), text, strict=True)))
    )
    products = [
        line for line in lowered.lower(video.numpy(), audio.numpy()).as_text().splitlines() if "dot_gen" in line
    ]
    assert len(products) == 10 and all("HIGHEST" in line for line in products)  # A TPU would round others.
    with pytest.raises(CheckpointError, match=r"audio_cross_attention_dim 32.*must be 48"):
        duration.duration_head(spec.config.duration_head, widths | {"audio": 48})


@pytest.mark.parametrize("fps", [0.5, 8, 24, 29.97, 50, 240])
@pytest.mark.parametrize("most", [None, 1, 1.02, 7.5, 60])
def test_seconds_become_the_frames_that_diffusers_makes(fps, most, spec):
    class Told(LTX2DurationHead):
        """Has no weights: its seconds are given."""

        def __init__(self, seconds):
            torch.nn.Module.__init__(self)
            self.seconds = seconds

        def forward(self, *tokens):
            return torch.tensor([self.seconds], dtype=torch.float64)

    bounds = {"frame_rate": fps, "temporal_compression_ratio": 8, "max_seconds": 20.0 if most is None else most}
    plan = spec.plan(GenerationRequest(fps=fps, max_seconds=most))
    assert plan.has_open_length
    chosen = []
    for seconds in (0.01, 0.9, 1.4, 2.0, 5.04, 7.4999, 19.9, 59, 1e6):
        made = spec.set_length(plan, seconds)
        assert made.request.frames == min(Told(seconds).predict_num_frames(**bounds), 2001)
        assert (not made.has_open_length and made.shapes != plan.shapes) or made.request.frames == plan.request.frames
        assert made.decoder_chunks == (spec.latent_frames(made.request.frames),)
        chosen.append(made.request.frames)
    assert chosen == sorted(chosen) and chosen[-1] == plan.request.frames  # It was planned for the longest.


def test_length_is_open_only_where_nothing_gives_it(spec):
    assert spec.plan(GenerationRequest()).request.frames == 473
    assert not spec.plan(GenerationRequest(frames=121)).has_open_length
    with pytest.raises(InvalidRequest) as refused:
        spec.plan(GenerationRequest(frames=121, max_seconds=4))
    assert refused.value.field == "max_seconds"
    own = dataclasses.replace(spec.overrides, defaults=(("frames", 33),))
    assert dataclasses.replace(spec, overrides=own).plan(GenerationRequest()).request.frames == 33
    without = published_spec(KIND)
    assert without.plan(GenerationRequest()).request.frames == 121
    with pytest.raises(InvalidRequest) as refused:
        without.plan(GenerationRequest(max_seconds=4))
    assert refused.value.field == "max_seconds"
    with pytest.raises(ValueError, match="open"):
        _ = StageMachine(spec.plan(GenerationRequest())).with_inputs().next


@pytest.mark.thorough
def test_video_has_the_length_that_diffusers_chooses_and_is_the_one_of_that_length(pipe, theirs):
    """Also where the encoder's result comes from a file, and the state from an earlier run."""
    video, _ = theirs(
        prompt=REQUEST.prompt, height=64, width=64, frame_rate=float(REQUEST.fps), sigmas=list(DISTILLED_SIGMAS),
        generator=torch.Generator().manual_seed(REQUEST.seed), output_type="np", return_dict=False,
        use_cross_timestep=True, **OFF,
    )  # fmt: skip
    ours = pipe.generate(REQUEST)
    frames = len(ours.frames)
    assert frames == video.shape[1] and 25 <= frames < 161
    assert np.abs(ours.pixels - video[0]).max() <= 2e-3
    given = pipe.generate(dataclasses.replace(REQUEST, frames=frames))
    assert np.array_equal(ours.pixels, given.pixels) and np.array_equal(ours.audio, given.audio)
    assert ours.tail.digest == given.tail.digest and ours.tail.samples
    plan = pipe.plan(REQUEST)
    conditioning, _ = parse_value(type(encoded := pipe.encode(plan)), dump_value(encoded), "a file")
    run = pipe.make_executor(plan, conditioning=conditioning)
    assert run.plan.request.frames == frames
    with pytest.raises(InvalidInput, match="no length"):
        pipe.make_executor(
            plan, conditioning=dataclasses.replace(conditioning, prompt={"text": conditioning.prompt["text"]})
        )
    with pytest.raises(InvalidRequest) as refused:
        pipe.make_executor(plan, noise=np.zeros(1))
    assert refused.value.field == "frames"
