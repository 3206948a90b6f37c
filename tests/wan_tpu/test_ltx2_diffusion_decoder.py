"""LTX-2.5's diffusion decoder against diffusers' class, and a whole video that it makes."""

import contextlib
import dataclasses
import json

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2 import LTX2VideoDiffusionDecodePipeline
from torch.nn.attention import flex_attention

from tests.children import run_on_devices
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import InvalidInput, InvalidRequest
from wan_tpu.families import open_spec, published_spec
from wan_tpu.families.ltx2 import diffusion_decoder
from wan_tpu.families.ltx2.classes import DIFFUSION_DECODER
from wan_tpu.families.ltx2.published import DISTILLED_SIGMAS
from wan_tpu.families.ltx2.small import make_checkpoint
from wan_tpu.pipeline import load_pipeline
from wan_tpu.request import GenerationRequest

# The smallest grid whose windows are full in every stage, and a wider one, which strips cut unevenly.
SMALLEST, WIDER = (2, 3, 5), (2, 3, 9)
SEED = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("ltx2") / "checkpoint", "ltx-2.5-distilled")
    (folder / "wan_tpu.json").write_text(json.dumps({"decoder": "diffusion"}))
    return folder


@pytest.fixture
def theirs(folder, monkeypatch):
    # torch would compile its attention, which torchax prevents.
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    return diffusers.LTX2VideoDiffusionDecoderModel.from_pretrained(folder / "diffusion_decoder").eval()


def draw_latents(channels, grid):
    return np.random.default_rng(0).standard_normal((1, channels, *grid)).astype(np.float32)


def draw_noise(grid):
    frames, rows, columns = grid
    shape = 1, 3, 8 * frames - 7, 32 * rows, 32 * columns
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).numpy()


@pytest.mark.parametrize("grid", [SMALLEST, pytest.param(WIDER, marks=pytest.mark.thorough)])
def test_pixels_are_those_of_diffusers_with_noise_drawn_after_that_of_the_latents(grid, folder, theirs):
    frames, rows, columns = grid
    size = {"height": 32 * rows, "width": 32 * columns, "frames": 8 * frames - 7}
    pipe = load_pipeline(folder, "float32", mesh=(1, 1, 1))
    plan = pipe.plan(GenerationRequest(prompt="A cat", seed=SEED, steps=8, preset="diffusers", **size))
    start, generator = pipe.initial_state(plan), torch.Generator().manual_seed(SEED)
    for drawn in (start.latents, start.audio):  # The whole video below shows that diffusers draws these.
        torch.randn(drawn.shape, generator=generator)
    latents = draw_latents(theirs.config.latent_channels, grid)
    mean, deviation = (getattr(theirs, f"latents_{name}").view(1, -1, 1, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        decoded = theirs.decode(torch.from_numpy(latents) * deviation + mean, generator=generator).sample
    expected = (decoded[0].permute(1, 2, 3, 0).numpy() / 2 + 0.5).clip(0, 1)
    pixels = np.concatenate(list(pipe.decode(latents, plan.request)))
    assert pixels.shape == expected.shape and pixels.std() > 0.02
    assert np.abs(pixels - expected).max() <= 2e-4
    with pytest.raises(InvalidInput, match="request"):
        next(pipe.decode(latents))


@pytest.mark.meshes
@pytest.mark.thorough
def test_eight_devices_decode_what_one_decodes(folder, tmp_path):
    """Strips are as wide as one latent, or two: some windows reach beyond the neighbouring strip."""
    channels = Checkpoint(folder).config("diffusion_decoder")["latent_channels"]
    np.savez(tmp_path / "in.npz", latents=draw_latents(channels, WIDER), noise=draw_noise(WIDER))
    run_on_devices("tests.wan_tpu.ltx2_decoder_worker", folder, tmp_path / "in.npz", tmp_path / "out.npz", count=8)
    pixels = np.load(tmp_path / "out.npz")
    expected = pixels["1x1x1"]
    assert len(pixels.files) > 1
    for mesh in pixels.files:
        assert np.abs(pixels[mesh] - expected).max() <= 1e-4 * np.abs(expected).max(), mesh


@pytest.mark.thorough
def test_whole_video_is_diffusers_with_noise_of_the_same_generator(folder, theirs):
    size = {"height": 96, "width": 160}
    pipe = load_pipeline(folder, "float32", mesh=(1, 1, 1))
    request = GenerationRequest(
        prompt="A cat",
        frames=9,
        seed=SEED,
        preset="diffusers",
        sigmas=DISTILLED_SIGMAS[-2:],
        generate_audio=False,
        **size,
    )
    video = pipe.generate(request)
    making = diffusers.LTX2Pipeline.from_pretrained(folder)
    generator = torch.Generator().manual_seed(SEED)
    scales = {f"{part}{name}_scale": 1.0 for part in ("", "audio_") for name in ("guidance", "modality")}
    scales |= {"stg_scale": 0.0, "audio_stg_scale": 0.0}
    latents, _ = making(
        prompt="A cat", num_frames=9, frame_rate=24.0, sigmas=list(DISTILLED_SIGMAS[-2:]), generator=generator,
        output_type="latent", use_cross_timestep=True, return_dict=False, **size, **scales,
    )  # fmt: skip
    decoding = LTX2VideoDiffusionDecodePipeline(diffusion_decoder=theirs, scheduler=making.scheduler)
    [frames] = decoding(latents, generator=generator, output_type="np", return_dict=False, denormalize=False)
    assert video.pixels.shape == frames[0].shape and video.pixels.std() > 0.02
    assert np.abs(video.pixels - frames[0]).max() <= 2e-3


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"frames": 1}, "frames"),
        ({"height": 64}, "height"),
        ({"width": 128}, "width"),
        ({"width": 128, "steps": 8}, "width"),
    ],
)
def test_video_with_windows_that_are_not_full_is_refused(fields, field, folder):
    request = {"prompt": "A cat", "height": 128, "width": 192, "frames": 9, "steps": 11}
    spec = open_spec(folder)
    spec.plan(GenerationRequest(**request))
    with pytest.raises(InvalidRequest) as refusal:
        spec.plan(GenerationRequest(**request | fields))
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("fields", "is_made"), [({}, True), ({"frames": 9}, False), ({"height": 192}, False), ({"width": 192}, False)]
)
def test_published_decoder_makes_17_frames_of_224_pixels_or_more(fields, is_made):
    spec = published_spec("ltx-2.5-distilled")
    spec = dataclasses.replace(spec, config=dataclasses.replace(spec.config, diffusion_decoder=DIFFUSION_DECODER))
    request = GenerationRequest(**{"height": 224, "width": 224, "frames": 17, "steps": 8} | fields)
    with contextlib.nullcontext() if is_made else pytest.raises(InvalidRequest):
        spec.plan(request)


def test_operations_are_those_of_the_matrices_and_windows():
    """By hand for one block of 16 channels in a grid of 11 x 11 x 11 with windows of all tokens."""
    tokens, channels = 11**3, 16
    expected = 2 * tokens * (4 * channels**2 + 3 * 4 * channels**2 + 2 * channels * tokens)
    assert diffusion_decoder._count_block(tokens, channels, (11, 11, 11)) == expected
