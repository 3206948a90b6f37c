"""LTX-2 by the commands, as a person types them: in one command and stage by stage; and what is refused."""

import json
import subprocess

import imageio_ffmpeg
import numpy as np
import pytest

from tests.conftest import PHOTO
from wan_tpu import DenoiseState, InvalidRequest, cli
from wan_tpu.commands import staged
from wan_tpu.commands.generate import generate
from wan_tpu.data import load_value
from wan_tpu.families import published_spec
from wan_tpu.request import GenerationRequest

KIND = "ltx-2.3-distilled"
SIZE = ["--size", "128x64", "--frames", "9", "--seed", "3"]
SETTINGS = [*SIZE, "--dtype", "float32", "--dp", "1", "--sp", "1", "--tp", "1"]
FFMPEG = imageio_ffmpeg.get_ffmpeg_exe()


def hear(path):
    """Return what a player hears, float32 [2, samples], and the rate that the file states."""
    command = [FFMPEG, "-v", "error", "-i", path, "-map", "0:a", "-f", "f32le", "-"]
    sound = np.frombuffer(subprocess.check_output(command), np.float32).reshape(-1, 2).T
    return sound, subprocess.run([FFMPEG, "-hide_banner", "-i", path], capture_output=True, text=True).stderr


@pytest.fixture(scope="module")
def model(checkpoint):
    return ["--model_id", str(checkpoint(KIND))]


@pytest.fixture(scope="module")
def video_file(model, tmp_path_factory):
    """A video of an image, in two stages."""
    out = tmp_path_factory.mktemp("generate") / "video.mp4"
    command = [*model, "--prompt", "A cat purrs", "--image", str(PHOTO), *SETTINGS, "--output", str(out)]
    assert cli.run(generate, command) == 0
    return out


@pytest.mark.thorough
@pytest.mark.long
def test_generate_writes_a_video_with_sound(video_file):
    sound, description = hear(video_file)
    assert "128x64" in description and "48000 Hz, stereo" in description
    # 9 frames last 0.375 s: 9 latents of the sound, 33 mel frames of 480 samples; AAC fills its last block up.
    assert 33 * 480 <= sound.shape[1] < 33 * 480 + 1024
    assert sound.std(axis=1).min() > 1e-3
    record = json.loads(video_file.with_suffix(".json").read_text())
    assert [stage["stage"] for stage in record["stages"]] == ["encoder", "denoise", "refine", "decoder"]
    assert [step["step"] for step in record["steps"]] == [*range(1, 12)]
    assert record["request"]["generate_audio"] is True
    assert all(stage["tflops_per_s"] > 0 for stage in record["stages"])


@pytest.mark.thorough
def test_stages_with_files_between_them_make_the_same_video(video_file, model, tmp_path):
    """Also where the first of two denoising stages ends, and the second begins from its file."""
    where = ["--input_dir", str(tmp_path)]
    command = [*model, "--prompt", "A cat purrs", "--image", str(PHOTO), *SETTINGS, "--output_dir", str(tmp_path)]
    assert cli.run(staged.encode, command) == 0
    assert cli.run(staged.denoise, [*where, "--dp", "1", "--stop_after_high"]) == 0
    half, _ = load_value(DenoiseState, tmp_path / staged.LATENTS)
    assert (half.step, half.latents.shape[3:]) == (8, (1, 2))
    assert cli.run(staged.denoise, [*where, "--dp", "1", "--resume"]) == 0
    whole, _ = load_value(DenoiseState, tmp_path / staged.LATENTS)
    assert (whole.step, whole.latents.shape[3:]) == (11, (2, 4))
    assert cli.run(staged.decode, [*where, "--dp", "1"]) == 0
    assert (tmp_path / "video.mp4").read_bytes() == video_file.read_bytes()


def test_picture_of_a_single_row_of_latents_is_refused_where_the_decoder_mirrors_it():
    """diffusers' module of LTX-2.0 fails there; that of LTX-2.3 has zeros beyond the picture."""
    for size in ({"width": 32, "height": 96}, {"width": 96, "height": 32}):
        with pytest.raises(InvalidRequest, match=r"is 32;.* 32, .* 64, .* 64"):
            published_spec("ltx-2").plan(GenerationRequest(**size))
        assert published_spec("ltx-2.3").plan(GenerationRequest(**size)).request.frames == 121


def test_steps_whose_noise_levels_are_all_one_are_refused():
    """diffusers shifts a dev model's schedule by the number of tokens: it divides by zero, and its video is NaN."""
    long, huge = {"height": 1088, "width": 1920, "frames": 257}, {"height": 8192, "width": 8192, "frames": 121}
    with pytest.raises(InvalidRequest, match=r"67320 tokens.*sigmas"):
        published_spec("ltx-2.3").plan(GenerationRequest(**long, preset="diffusers"))
    with pytest.raises(InvalidRequest, match="1048576 tokens"):  # float32 has no such shift.
        published_spec("ltx-2.3").plan(GenerationRequest(**huge, preset="diffusers"))
    assert published_spec("ltx-2.3-distilled").plan(GenerationRequest(**long, preset="diffusers")).request.steps == 11
    for size in (long, huge):
        assert published_spec("ltx-2.3").plan(GenerationRequest(**size)).request.steps == 30
    single = published_spec("ltx-2.3").plan(GenerationRequest(steps=1)).request
    assert published_spec("ltx-2.3").schedule(single).sigmas[0] == 1


def test_distilled_model_takes_its_own_numbers_of_steps_or_sigmas():
    for kind, steps in (("ltx-2.3-distilled", (8, 11)), ("ltx-2-distilled", (8, 11)), ("ltx-2.3", (1, 8, 11, 30))):
        for count in steps:
            assert published_spec(kind).plan(GenerationRequest(steps=count)).request.steps == count
    own = published_spec("ltx-2.3-distilled").plan(GenerationRequest(sigmas=(1, 0.9, 0.7, 0.4)))
    assert own.request.steps == 4 and [expert.stage for expert in own.experts] == ["denoise"]
    for steps in (1, 7, 9, 12):
        with pytest.raises(InvalidRequest, match=f"steps is {steps}"):
            published_spec("ltx-2.3-distilled").plan(GenerationRequest(steps=steps))
