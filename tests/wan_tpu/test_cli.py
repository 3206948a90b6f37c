"""The commands, as a person types them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import diffusers
import imageio.v3 as iio
import numpy as np
import pytest

from tests.conftest import PHOTO, ROOT, STAGES
from tests.wan_tpu import adapter_files
from tests.wan_tpu.minimax_h3_ref2va import write_sound
from wan_tpu import DenoiseState, GenerationRequest, InvalidInput, InvalidRequest, cli
from wan_tpu.commands import staged
from wan_tpu.commands.arguments import add_request_arguments, request_from
from wan_tpu.commands.generate import generate
from wan_tpu.commands.parser import Parser
from wan_tpu.data import Conditioning, load_value, save_value, write_json
from wan_tpu.families import open_spec

SETTINGS = ["--size", "48x32", "--frames", "5", "--steps", "4", "--guidance_scale", "2", "--dtype", "float32"]
SETTINGS += ["--fps", "8", "--seed", "3", "--dp", "1"]
REQUEST = ["--prompt", "A cat", "--negative_prompt", "ugly", "--image", str(PHOTO), *SETTINGS]

CUT = [*REQUEST, "--shift", "8", "--prompt", "A cat " * 600]  # longer than the model reads; not the checkpoint's shift


@pytest.fixture(scope="module")
def video_file(checkpoint, tmp_path_factory):
    """A video made by `generate` with a shift that isn't the checkpoint's."""
    out = tmp_path_factory.mktemp("generate") / "new" / "video.mp4"
    model = ["--model_id", str(checkpoint("wan2.2-i2v-a14b"))]
    profile = ["--profile", "--profile_output_path", str(out.parent / "profile")]
    assert cli.run(generate, [*model, *CUT, "--output", str(out), *profile]) == 0
    return out


def test_generate_writes_video_sheet_and_record(video_file):
    assert sorted(p.name for p in video_file.parent.iterdir()) == [
        "profile",
        "video.json",
        "video.mp4",
        "video.sheet.png",
    ]
    assert iio.imread(video_file, plugin="FFMPEG").shape == (5, 32, 48, 3)
    record = json.loads(video_file.with_suffix(".json").read_text())
    assert record["request"]["shift"] == 8
    assert record["request"]["guidance_scale_2"] == 2
    assert record["settings"]["mesh"] == {"dp": 1, "sp": 1, "tp": 1}
    assert {"python", "jax", "libtpu"} <= set(record["versions"])
    assert_cut(record)
    stages = {stage["stage"]: stage for stage in record["stages"]}
    assert list(stages) == list(STAGES)
    for stage in stages.values():
        assert stage["total_s"] == pytest.approx(stage["load_s"] + stage["compile_s"] + stage["run_s"], abs=0.01)
        assert stage["tflops_per_s"] > 0
        assert 0 < stage["host_s"] < stage["run_s"]  # in each the host prepares, copies or encodes
    video = record["video"]
    assert video["total_s"] > sum(stage["total_s"] for stage in stages.values())
    assert video["host_s"] > sum(stage["host_s"] for stage in stages.values())
    assert stages["denoise_high"]["compile_s"] > stages["denoise_low"]["compile_s"] == 0  # one program for both
    assert [step["step"] for step in record["steps"]] == [1, 2, 3, 4]
    assert list((video_file.parent / "profile").rglob("*.xplane.pb"))


def assert_cut(record):
    [warning] = record["warnings"]
    assert "the model reads 512: cut after" in warning


@pytest.mark.thorough
def test_adapters_and_sigmas_stage_by_stage(checkpoint, tmp_path):
    """As in one command; stage 2 may be told others."""
    folder, out = tmp_path / "stages", tmp_path / "video.mp4"
    source = checkpoint("wan2.2-i2v-a14b")
    transformer = diffusers.WanTransformer3DModel.from_pretrained(source, subfolder="transformer")
    names = adapter_files.blocks(transformer, adapter_files.WAN)
    factors = adapter_files.name_tensors(adapter_files.factors(transformer, names), names, "diffusion_model.")
    path = adapter_files.save(factors, tmp_path / "lora.safetensors")
    index = REQUEST.index("--steps")
    argv = [*REQUEST[:index], *REQUEST[index + 2 :], "--model_id", str(source), "--solver", "euler"]
    sampling = ["--sigmas", "1", "0.9", "0.5", "--switch_step", "1", "--lora", f"{path}:0.5", "--lora", f"{path}@low"]
    assert cli.run(generate, [*argv, *sampling, "--output", str(out)]) == 0
    assert cli.run(staged.encode, [*argv, "--steps", "2", "--output_dir", str(folder)]) == 0
    where = ["--input_dir", str(folder)]
    assert cli.run(staged.denoise, [*where, *sampling, "--stop_after_high"]) == 0
    assert load_value(DenoiseState, folder / staged.LATENTS)[0].step == 1
    assert cli.run(staged.denoise, [*where, "--resume"]) == 0
    assert cli.run(staged.decode, where) == 0
    assert np.array_equal(iio.imread(folder / "video.mp4", plugin="FFMPEG"), iio.imread(out, plugin="FFMPEG"))
    request = json.loads(out.with_suffix(".json").read_text())["request"]
    assert request["sigmas"] == [1, 0.9, 0.5] and request["switch_step"] == 1 and request["steps"] == 3
    assert request["loras"] == [
        {"path": path, "scale": 0.5, "expert": "both"},
        {"path": path, "scale": 1, "expert": "low"},
    ]
    assert cli.run(staged.denoise, [*where, "--switch_step", "9", "--overwrite"]) == 2

    # Settings and model travel with the latents they made; a bfloat16 stage 2 takes float32 embeddings.
    other = shutil.copytree(source, tmp_path / "other")
    options = "--steps 2 --guidance_scale 1 --seed 4 --dtype bfloat16 --overwrite"
    overridden = ["--model", str(other), *options.split()]
    assert cli.run(staged.denoise, [*where, *overridden]) == 0
    run = staged.Run.from_json(load_value(DenoiseState, folder / staged.LATENTS)[1], folder)
    assert (run.request.steps, run.request.guidance_scale_2, run.request.seed, run.dtype) == (2, 1, 4, "bfloat16")
    assert run.model_id == str(other)


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        (["--steps", "2"], "strength", "strength is 0.3, which leaves none of the 2 steps"),
        (["--sigmas", "1", "0.5"], "strength", "strength is 0.3, which leaves none of the 2 steps"),
        (["--switch_step", "99"], "switch_step", "switch_step is 99, but there are 8 steps"),
        (["--cache", "magcache"], "cache", "leave strength out"),
    ],
)
def test_stage_2_checks_what_began_as_a_video(options, field, message, checkpoint, tmp_path):
    source = checkpoint("wan2.2-t2v-a14b")
    request = GenerationRequest(prompt="a dog", strength=0.3, steps=8).resolve(open_spec(source).defaults)
    run = staged.Run("id", str(source), "float32", request, ())
    write_json(tmp_path / staged.CONFIG, run.to_json())
    latents = np.zeros((1, 16, 1, 4, 4), np.float32)
    conditioning = Conditioning({"text": np.zeros((1, 4, 4), np.float32)}, video_latents=latents)
    save_value(conditioning, tmp_path / staged.EMBEDDINGS, {"id": run.id})
    with pytest.raises(InvalidRequest, match=message) as raised:
        staged.denoise(["--input_dir", str(tmp_path), "--dp", "1", *options])
    assert raised.value.field == field


def test_stage_2_refuses_another_seed_than_that_of_the_noise_of_images(checkpoint, tmp_path):
    source = checkpoint("cogvideox1.5-5b-i2v")
    request = GenerationRequest(prompt="a dog", seed=3).resolve(open_spec(source).defaults)
    run = staged.Run("id", str(source), "float32", request, ())
    write_json(tmp_path / staged.CONFIG, run.to_json())
    text = {"text": np.zeros((1, 4, 4), np.float32)}
    conditioning = Conditioning(text, image_latents=np.zeros((1, 16, 1, 4, 4), np.float32))
    save_value(conditioning, tmp_path / staged.EMBEDDINGS, {"id": run.id})
    with pytest.raises(InvalidInput, match=r"--seed is 4.* seed 3"):
        staged.denoise(["--input_dir", str(tmp_path), "--dp", "1", "--seed", "4"])


def test_staged_equals_one_command(video_file, checkpoint, tmp_path, capsys):
    """Also where stage 2 stops at the boundary, and with a shift that only stage 1 was told."""
    folder = tmp_path / "stages"
    stage1 = ["--model_id", str(checkpoint("wan2.2-i2v-a14b")), *CUT, "--output_dir", str(folder)]
    where = ["--input_dir", str(folder)]
    assert cli.run(staged.denoise, where) == 2  # nothing there yet, and nothing made
    assert not folder.exists()
    assert cli.run(staged.encode, stage1) == 0
    assert cli.run(staged.denoise, [*where, "--warmup_steps", "1", "--stop_after_high"]) == 0
    assert 0 < load_value(DenoiseState, folder / staged.LATENTS)[0].step < 4
    assert cli.run(staged.decode, where) == 2  # not finished: refused
    half = (folder / staged.LATENTS).read_bytes()
    # The same model may lie elsewhere on the machine that goes on.
    other = shutil.copytree(stage1[1], tmp_path / "other")
    assert cli.run(staged.denoise, [*where, "--resume", "--model", str(other)]) == 0
    assert load_value(DenoiseState, folder / staged.LATENTS)[0].step == 4
    assert cli.run(staged.decode, [*where, "--output_video", str(folder / "video.mp4")]) == 0
    assert np.array_equal(iio.imread(folder / "video.mp4", plugin="FFMPEG"), iio.imread(video_file, plugin="FFMPEG"))
    said = capsys.readouterr().err
    assert said.count("the model reads 512") == 1  # by stage 1
    assert f"continues with those of {other}" in said
    for name in (staged.CONFIG, "video.json"):
        assert_cut(json.loads((folder / name).read_text()))

    # A state goes on only with the embeddings it began with, and only its own model.
    capsys.readouterr()
    assert cli.run(staged.decode, [*where, "--model_id", "no/such/model", "--overwrite"]) == 2
    assert "no/such/model" in capsys.readouterr().err
    (folder / staged.LATENTS).write_bytes(half)
    assert cli.run(staged.denoise, [*where, "--resume", "--seed", "5"]) == 2
    assert "omit the sampling options" in capsys.readouterr().err
    assert cli.run(staged.denoise, [*where, "--resume", "--precision", "bfloat16"]) == 2
    assert "omit --precision" in capsys.readouterr().err
    assert cli.run(staged.encode, [*stage1, "--prompt", "A dog", "--overwrite"]) == 0
    assert cli.run(staged.denoise, [*where, "--resume"]) == 2
    assert "embeddings that stage 1 has since replaced" in capsys.readouterr().err
    config = folder / staged.CONFIG
    config.write_text(config.read_text().replace('"id": "', '"id": "0'))
    assert cli.run(staged.denoise, [*where, "--overwrite"]) == 2
    assert "different runs of stage 1" in capsys.readouterr().err


def test_stages_with_files_between_them_refuse_a_given_sound(tmp_path):
    """Their files don't hold it, so the last stage would write another one."""
    song = write_sound(tmp_path / "song.wav", 1.0)
    command = ["--model_id", str(tmp_path), "--prompt", "A cat purrs", "--reference", f"soundtrack:{song}"]
    with pytest.raises(InvalidRequest) as refused:
        staged.encode([*command, "--output_dir", str(tmp_path / "stages")])
    assert refused.value.field == "references"


def test_sound_is_asked_for_or_left_out_by_an_option():
    parser = Parser(prog="generate")
    add_request_arguments(parser)
    for options, expected in (([], None), (["--generate-audio"], True), (["--no-generate-audio"], False)):
        assert request_from(parser.parse_args(["--prompt", "a cat", *options])).generate_audio is expected


def test_existing_output_is_kept(video_file, checkpoint, capsys):
    before = video_file.read_bytes()
    model = ["--model_id", str(checkpoint("wan2.2-i2v-a14b"))]
    assert cli.run(generate, [*model, *REQUEST, "--output", str(video_file)]) == 2
    assert "exists" in capsys.readouterr().err
    assert video_file.read_bytes() == before


@pytest.mark.long
@pytest.mark.parametrize(
    ("sent", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.thorough), (signal.SIGTERM, 143)]
)
def test_ctrl_c_and_sigterm_leave_nothing_half_written(sent, code, checkpoint, tmp_path):
    model = ["--model_id", str(checkpoint("wan2.1-t2v-1.3b")), "--prompt", "A cat", *SETTINGS]
    command = [sys.executable, "-m", "actors.cli", "generate", *model, "--steps", "1", "--guidance_scale", "1"]
    process = subprocess.Popen(
        [*command, "--output", str(tmp_path / "video.mp4")], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if line.startswith("decoder: 1"):
            process.send_signal(sent)
            break
    assert "interrupted" in process.stderr.read()
    assert process.wait(60) == code
    assert not list(tmp_path.iterdir())


FORKS_BESIDE_GRPC = """
import subprocess, sys, time
from wan_tpu import cli

def command(argv):
    import grpc
    grpc.channel_ready_future(grpc.insecure_channel("127.0.0.1:1"))
    time.sleep(0.2)
    for _ in range(3):
        subprocess.run(["true"], preexec_fn=lambda: None)

sys.exit(cli.run(command))
"""


@pytest.mark.thorough
def test_libraries_are_quiet(checkpoint, tmp_path):
    """Each is as a user has it: their variables, which the tests set for all, are left out."""
    names = ("JAX_PLATFORMS", *cli.QUIET, *cli.NO_TPU)
    environment = {name: value for name, value in os.environ.items() if name not in names}
    # JAX is asked for devices before the request is refused.
    wrong = [*REQUEST, "--frames", "6", "--output", str(tmp_path / "video.mp4")]
    generated = ["-m", "actors.cli", "generate", "--model", str(checkpoint("wan2.2-i2v-a14b")), *wrong]
    for argv, expected in ((["-c", FORKS_BESIDE_GRPC], r""), (generated, r"error: .*4n \+ 1.*\n")):
        process = subprocess.run([sys.executable, *argv], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert re.fullmatch(expected, process.stderr), process.stderr


def test_console_script_lists_its_commands():
    command = Path(sys.executable).with_name("wan-tpu")
    output = subprocess.run([command, "--help"], capture_output=True, text=True, check=True).stdout
    for name in ("generate", "stage1", "stage2", "stage3"):
        assert name in output
    wrong = subprocess.run([command, "fly"], capture_output=True, text=True, env=os.environ, check=False)
    assert wrong.returncode == 2
    assert "choose from" in wrong.stderr
