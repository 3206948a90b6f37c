"""The reference for numbers is diffusers: same checkpoint, same initial noise, float32, on CPU."""

import dataclasses

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import PHOTO, record_steps
from tests.wan_tpu.diffusers_steps import keep_latents
from wan_tpu import GenerationRequest, InvalidRequest, load_pipeline
from wan_tpu.data import Video
from wan_tpu.families.wan import vae
from wan_tpu.media.reading import read_frames

FRAMES, STEPS = 9, 4
LAST = Image.open(PHOTO).convert("RGB").transpose(Image.Transpose.FLIP_TOP_BOTTOM).resize((90, 60))
PIXEL_TOLERANCE = 2e-3  # half a level of 8 bits; float32 rounding gives about 2e-6
LATENT_TOLERANCE = 1e-4  # relative to the largest latent; float32 rounding gives about 5e-7

# Every architecture. The 14B's small T2V differs from that of 1.3B in its name, as 480p's I2V does from 720p's;
# Euler's table is held for every shift and number of steps in test_schedules.py.
CASES = [
    ("wan2.1-t2v-1.3b", "t2v", "unipc"),
    pytest.param("wan2.1-i2v-14b-720p", "i2v", "unipc", marks=pytest.mark.thorough),
    pytest.param("wan2.2-t2v-a14b", "t2v", "unipc", marks=pytest.mark.thorough),
    ("wan2.2-i2v-a14b", "i2v", "unipc"),
    pytest.param("wan2.2-i2v-a14b", "i2v", "euler", marks=pytest.mark.thorough),
    pytest.param("wan2.1-flf2v-14b-720p", "flf2v", "unipc", marks=pytest.mark.thorough),
    pytest.param("wan2.2-i2v-a14b", "flf2v", "unipc", marks=pytest.mark.long),
    pytest.param("wan2.2-ti2v-5b", "t2v", "unipc", marks=pytest.mark.thorough),
    ("wan2.2-ti2v-5b", "i2v", "unipc"),
]


@pytest.mark.parametrize(("kind", "task", "solver"), CASES)
def test_same_latents_and_pixels_as_diffusers(kind, task, solver, checkpoint, pipeline):
    ours = pipeline(kind)
    request = GenerationRequest(
        prompt="A cat &amp; a dog\n look into  the camera",
        negative_prompt="ugly",
        image=None if task == "t2v" else PHOTO,
        last_image=LAST if task == "flf2v" else None,
        height=64,
        width=96,
        frames=FRAMES,
        steps=STEPS,
        guidance_scale=3.5,
        guidance_scale_2=2.5 if "2.2" in kind and "a14b" in kind else None,
        shift=5.0,
        solver=solver,
    )
    shape = ours.runtime.model.spec.latent_shape(ours.plan(request).request)
    noise = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    expected_pixels, expected_latents = run_diffusers(checkpoint(kind), request, task, noise)

    events = []
    video = ours.generate(request, noise=noise, on_step=lambda event: events.append((event.stage, event.latents)))

    assert len(events) == STEPS
    if ours.runtime.model.spec.boundary_ratio is not None:
        assert {stage for stage, _ in events} == {"denoise_high", "denoise_low"}
    for (_, got), expected in zip(events, expected_latents, strict=True):
        assert np.abs(got - expected).max() <= LATENT_TOLERANCE * np.abs(expected).max()
    assert video.pixels.std() > 0.05  # a flat picture would pass any comparison
    assert np.abs(video.pixels - expected_pixels).max() <= PIXEL_TOLERANCE
    if task == "flf2v":  # A wrong last image would be noticed.
        off = (
            record_steps(ours, dataclasses.replace(request, last_image=PHOTO), noise)[-1].latents - expected_latents[-1]
        )
        assert np.abs(off).max() > 10 * LATENT_TOLERANCE * np.abs(expected_latents[-1]).max()


def run_diffusers(folder, request, task, noise):
    """Return pixels [T, H, W, 3] and the latents after each step, by diffusers' own pipeline."""
    pipeline_class = diffusers.WanPipeline if task == "t2v" else diffusers.WanImageToVideoPipeline
    pipe = pipeline_class.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    if request.solver == "euler":
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=request.shift)
    else:
        pipe.scheduler = diffusers.UniPCMultistepScheduler.from_config(pipe.scheduler.config, flow_shift=request.shift)
    latents = []

    image = {} if task == "t2v" else {"image": request.image}
    if task == "flf2v":
        image["last_image"] = request.last_image
    second = {"guidance_scale_2": request.guidance_scale_2} if request.guidance_scale_2 else {}
    frames = pipe(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        height=request.height,
        width=request.width,
        num_frames=request.frames,
        num_inference_steps=request.steps,
        guidance_scale=request.guidance_scale,
        latents=torch.from_numpy(noise),
        callback_on_step_end=keep_latents(latents),
        output_type="np",
        **image,
        **second,
    ).frames[0]
    return frames, latents


@pytest.mark.parametrize(
    ("strength", "solver"),
    [
        (0.7, "unipc"),
        pytest.param(1.0, "unipc", marks=pytest.mark.thorough),
        pytest.param(0.5, "euler", marks=pytest.mark.thorough),
    ],
)
def test_a_video_is_restyled_as_diffusers_does(strength, solver, checkpoint, pipeline, tmp_path):
    kind = "wan2.1-t2v-1.3b"
    source = Video(np.random.default_rng(1).random((11, 48, 80, 3), np.float32), 8.0).save(tmp_path / "source.mp4")
    ours = pipeline(kind)
    request = GenerationRequest(
        prompt="a dog", negative_prompt="", video=source, strength=strength, height=64, width=96, frames=FRAMES,
        steps=8, guidance_scale=3.0, shift=5.0, seed=5, solver=solver,
    )  # fmt: skip
    pipe = diffusers.WanVideoToVideoPipeline.from_pretrained(checkpoint(kind))
    pipe.set_progress_bar_config(disable=True)
    if solver == "euler":
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0)
        # The pipeline asks its scheduler for add_noise, which this one calls scale_noise with another order.
        pipe.scheduler.add_noise = lambda sample, noise, t: pipe.scheduler.scale_noise(sample, t, noise)
    else:
        pipe.scheduler = diffusers.UniPCMultistepScheduler.from_config(pipe.scheduler.config, flow_shift=5.0)
    expected = []

    frames = pipe(
        video=read_frames(source, FRAMES), prompt="a dog", negative_prompt="", height=64, width=96,
        num_inference_steps=8, guidance_scale=3.0, strength=strength, generator=torch.Generator().manual_seed(5),
        callback_on_step_end=keep_latents(expected), output_type="np",
    ).frames[0]  # fmt: skip
    events = []
    video = ours.generate(request, on_step=events.append)
    assert [event.step for event in events] == list(range(8 - int(8 * strength) + 1, 9))
    for event, reference in zip(events, expected, strict=True):
        assert np.abs(event.latents - reference).max() <= LATENT_TOLERANCE * np.abs(reference).max()
    assert np.abs(video.pixels - frames).max() <= PIXEL_TOLERANCE


def test_videos_that_cant_be_begun_with_are_refused(pipeline, tmp_path):
    source = Video(np.zeros((6, 32, 32, 3), np.float32), 8.0).save(tmp_path / "source.mp4")
    noise = tmp_path / "noise.mp4"
    noise.write_bytes(b"nothing" * 100)
    settings = {"height": 64, "width": 96, "frames": 5, "steps": 4, "guidance_scale": 1.0}
    for fields, field, message in (
        ({"video": tmp_path / "none.mp4"}, "video", r"none\.mp4"),
        ({"video": source, "strength": 0.1}, "strength", "at least 0.25"),
        ({"strength": 0.5}, "strength", "video"),
        ({"video": source, "frames": 9}, "frames", r"\b6\b.*\b9\b.*\b5\b"),
        ({"video": noise}, "video", r"noise\.mp4"),
    ):
        with pytest.raises(InvalidRequest, match=message) as raised:
            pipeline("wan2.1-t2v-1.3b").generate(GenerationRequest(**settings | fields))
        assert raised.value.field == field
    with pytest.raises(InvalidRequest, match=r"wan2\.2-t2v-a14b"):
        pipeline("wan2.2-ti2v-5b").plan(GenerationRequest(video=source))


@pytest.mark.thorough
@pytest.mark.long
def test_bfloat16_stays_within_its_bound(pipeline):
    """Bound on the root mean square of the latents' error, relative to the latents.

    Unit roundoff of bfloat16 is u = 2^-8. The residual stream is rounded to it 3 times a block, and about 6 times
    on the way in and out; independent roundings add up to sqrt(3 blocks + 6) u in the velocity. Guidance g
    multiplies the two branches' errors by up to g + (g - 1). The steps of a flow solver weigh velocities by
    sigma_i - sigma_i+1, which sum to one, so the latents inherit that bound. It doesn't grow with the steps.
    """
    guidance, blocks = 3.5, 2
    bound = (2 * guidance - 1) * np.sqrt(3 * blocks + 6) * 2**-8
    request = GenerationRequest(
        prompt="A cat looks into the camera",
        image=PHOTO,
        height=64,
        width=96,
        frames=9,
        steps=6,
        guidance_scale=guidance,
        shift=5.0,
        seed=3,
    )
    latents, pixels = {}, {}
    for dtype in ("float32", "bfloat16"):
        pipe = pipeline("wan2.2-i2v-a14b", dtype)
        events = []
        pixels[dtype] = pipe.generate(request, on_step=lambda e, events=events: events.append(e.latents)).pixels
        latents[dtype] = events[-1]
    error = rms(latents["bfloat16"] - latents["float32"]) / rms(latents["float32"])
    print(f"latents {error:.4f} of bound {bound:.4f}, pixels {rms(pixels['bfloat16'] - pixels['float32']):.4f}")
    assert latents["bfloat16"].dtype == np.float32
    assert 1e-4 < error < bound
    # The decoder's own 30 roundings add sqrt(30) u of the picture's amplitude (at most 1/2).
    assert rms(pixels["bfloat16"] - pixels["float32"]) < (bound + np.sqrt(30) * 2**-8) / 2


def rms(values):
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.mark.thorough
def test_a_decoder_makes_the_same_pixels_whether_its_rows_are_folded_or_not(checkpoint, pipeline, monkeypatch):
    """They aren't on a v5p, and are on other chips and in the other tests."""
    kind, request = "wan2.1-t2v-1.3b", GenerationRequest(height=64, width=96, frames=9, steps=1, guidance_scale=1.0)
    folded = pipeline(kind).generate(request).pixels
    monkeypatch.setattr(vae, "_can_fold", lambda half, cut: False)
    unfolded = load_pipeline(checkpoint(kind), dtype="float32", mesh=(1, 1, 1)).generate(request).pixels
    assert folded.std() > 0.05 and np.abs(folded - unfolded).max() <= 1e-5
