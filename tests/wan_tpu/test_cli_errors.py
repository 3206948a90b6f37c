"""Commands refuse bad input with one line, and leave nothing behind when a run fails."""

import io
import json
import shutil
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch

from tests.conftest import PHOTO
from tests.wan_tpu.test_cli import REQUEST, SETTINGS
from wan_tpu import cli
from wan_tpu.commands import staged
from wan_tpu.commands.calibrate import calibrate
from wan_tpu.commands.generate import generate


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--size", "48x30"], "nearest 32"),
        (["--size", "²x32"], "WIDTHxHEIGHT"),
        (["--seconds", "2"], "--frames"),
        (["--steps", "1.5"], "see wan-tpu generate --help"),
        (["--num_frames", "5"], "there is no --num_frames (did you mean --frames?)"),
        (["--prompt", "caf\udce9"], "isn't valid Unicode"),
        (["--image", "https://example.org/cat.png"], "download it"),
        (["--image", "x" * 5000], "can't be read"),
        (["--output", "/tmp"], "is a folder"),
        (["--output", "x" * 300], "choose a folder"),
        (["--profile", "--profile_output_path", __file__], "is a file; give a folder"),
        (["--frames", "6"], "4n + 1"),
        (["--image", "none.png"], "is not a file"),
        (["--model_id", "no/model/here"], "hub id"),
        (["--model_id", "no-owner/no-such-model"], "unset HF_HUB_OFFLINE"),
        (["--dp", "3"], "there are 1"),
        (["--output", "/proc/nothing/video.mp4"], "choose a folder that can be written to"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(change, message, checkpoint, tmp_path, capsys):
    model = ["--model_id", str(checkpoint("wan2.2-i2v-a14b")), "--output", str(tmp_path / "video.mp4")]
    capsys.readouterr()
    start = time.process_time()
    assert cli.run(generate, [*model, *REQUEST, *change]) == 2
    lines = capsys.readouterr().err.removeprefix(f"opening {checkpoint('wan2.2-i2v-a14b')}\n").splitlines()
    [error] = lines
    assert error.startswith("error: ") and message in error
    assert time.process_time() - start < 3  # nothing was loaded or compiled
    assert not list(tmp_path.iterdir())


LTX_2, MINIMAX_H3 = "ltx-2.3-distilled", "minimax-h3"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (LTX_2, ["--size", "96x64"], "two stages need a multiple of 64, nearest 128, or give steps 8 for one stage"),
        (LTX_2, ["--steps", "20"], "the noise levels of 8, or 11 in two stages: give that many, or your own sigmas"),
        (MINIMAX_H3, ["--prompt", ""], "prompt is empty, but this model needs a prompt or an image"),
        (MINIMAX_H3, ["--frames", "120"], "frames is 120; it must be 17n + 107, nearest 124"),
        (MINIMAX_H3, ["--frames", "379"], "up to 362, nearest 362"),
        (MINIMAX_H3, ["--fps", "30"], "supports only 24: leave it out"),
    ],
)
def test_request_that_another_family_can_not_make_is_one_line(kind, change, message, checkpoint, tmp_path, capsys):
    size = ["--size", "128x64", *(["--frames", "9"] if kind == LTX_2 else [])]
    command = ["--model_id", str(checkpoint(kind)), "--prompt", "A cat", *size, "--output", str(tmp_path / "video.mp4")]
    capsys.readouterr()
    assert cli.run(generate, [*command, *change]) == 2
    [error] = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("opening ")]
    assert message in error


def test_a_prompt_is_only_empty_where_it_is_said(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    argv = ["--model-id", str(checkpoint("wan2.2-i2v-a14b")), *REQUEST[2:], "--frames", "5"]
    output = ["--output", str(tmp_path / "video.mp4")]
    for command in (generate, staged.encode, calibrate):
        assert cli.run(command, [*argv, *(output if command is generate else [])]) == 2
        assert capsys.readouterr().err.startswith("error: --prompt is missing")
    assert cli.run(generate, [*argv, *output, "--prompt", "", "--frames", "6"]) == 2
    assert "4n + 1" in capsys.readouterr().err  # the prompt is fine


def damage(folder, file, change):
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(change(content)))


def test_an_image_is_never_written_over(checkpoint, tmp_path, capsys):
    image = Path(shutil.copy(PHOTO, tmp_path / "cat.sheet.png"))
    request = ["--model_id", str(checkpoint("wan2.2-i2v-a14b")), *REQUEST, "--image", str(image), "--overwrite"]
    assert cli.run(generate, [*request, "--output", str(tmp_path / "cat.mp4")]) == 2
    assert "which is an input; choose another path" in capsys.readouterr().err
    assert image.read_bytes() == PHOTO.read_bytes()


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("model_index.json", lambda c: [], "isn't a JSON object"),
        ("model_index.json", lambda c: c | {"transformer": ["a"]}, "model_index.json has transformer"),
        ("vae/config.json", lambda c: {}, "fetch both again from the same place"),
        ("vae/config.json", lambda c: c | {"latents_mean": [0]}, "1 numbers in latents_mean; with z_dim 16"),
        ("text_encoder/config.json", lambda c: c | {"d_model": "wide"}, "can't be used to build the model"),
        ("scheduler/scheduler_config.json", lambda c: c | {"use_karras_sigmas": True}, "use_karras_sigmas True"),
        ("tokenizer/tokenizer.json", lambda c: {}, "doesn't hold a working tokenizer"),
    ],
)
def test_damaged_configurations_are_one_line_and_exit_code_2(file, change, message, checkpoint, tmp_path, capsys):
    folder = shutil.copytree(checkpoint("wan2.2-i2v-a14b"), tmp_path / "checkpoint")
    damage(folder, file, change)
    out = tmp_path / "out" / "video.mp4"
    assert cli.run(generate, ["--model_id", str(folder), *REQUEST, "--output", str(out)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_a_later_component_is_refused_before_any_compute(checkpoint, tmp_path, capsys):
    folder = shutil.copytree(checkpoint("wan2.2-i2v-a14b"), tmp_path / "checkpoint")
    file = next((folder / "transformer_2").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    assert cli.run(generate, ["--model_id", str(folder), *REQUEST, "--output", str(tmp_path / "video.mp4")]) == 2
    output = capsys.readouterr().err
    assert "transformer_2" in output
    assert "encoder:" not in output  # no stage began


# What an unhealthy text encoder does is shown on slices, in tests/actors/on_slices/test_pipeline.py.
@pytest.mark.parametrize(
    ("kind", "component", "where"),
    [
        ("wan2.1-t2v-1.3b", "transformer", "denoise, step 1 of"),
        pytest.param("wan2.2-i2v-a14b", "vae", "encoder, VAE chunk 1 of 2", marks=pytest.mark.long),
    ],
)
def test_nan_weights_fail_the_run_with_the_stage_named(kind, component, where, checkpoint, tmp_path, capsys):
    folder = shutil.copytree(checkpoint(kind), tmp_path / "checkpoint")
    file = next((folder / component).glob("*.safetensors"))
    tensors = safetensors.torch.load_file(file)
    name = next(n for n in tensors if n.startswith(("encoder.conv_in.bias", "blocks.0.ffn")))
    tensors[name][:] = float("nan")
    safetensors.torch.save_file(tensors, file)
    out = tmp_path / "out" / "video.mp4"
    image = ["--image", str(PHOTO)] if "i2v" in kind else []
    request = ["--prompt", "A cat", *image, *SETTINGS, "--guidance_scale", "1"]
    assert cli.run(generate, ["--model_id", str(folder), *request, "--output", str(out)]) == 1
    assert f"error: {where}" in capsys.readouterr().err.splitlines()[-1]
    assert not list(out.parent.iterdir())


@pytest.mark.long
def test_constant_video_fails_the_run(checkpoint, tmp_path, capsys):
    folder = shutil.copytree(checkpoint("wan2.1-t2v-1.3b"), tmp_path / "checkpoint")
    file = next((folder / "vae").glob("*.safetensors"))
    tensors = safetensors.torch.load_file(file)
    tensors["decoder.conv_out.weight"][:] = 0
    safetensors.torch.save_file(tensors, file)
    out = tmp_path / "out" / "video.mp4"
    request = ["--prompt", "", *SETTINGS, "--steps", "1", "--guidance_scale", "1"]
    assert cli.run(generate, ["--model", str(folder), *request, "--output", str(out)]) == 1
    assert "same colour" in capsys.readouterr().err
    assert not list(out.parent.iterdir())
