"""MiniMax-H3 by the commands, as a person types them: in one command, stage by stage, in a batch, and refused."""

import json

import av
import numpy as np
import pytest

from actors.commands.batch import batch
from tests.conftest import PHOTO
from wan_tpu import DenoiseState, cli
from wan_tpu.commands import staged
from wan_tpu.commands.generate import generate
from wan_tpu.data import load_value

KIND = "minimax-h3"
PROMPT = "A cat plays the piano"
IMAGES = ["--image", str(PHOTO), "--last_image", str(PHOTO)]
MESH = ["--dtype", "float32", "--dp", "1", "--sp", "1", "--tp", "1"]
SETTINGS = ["--size", "64x32", "--steps", "2", "--seed", "3", *MESH]
LATENTS = 207  # Of 124 frames at 24 a second, at 40 a second; each is 800 samples.


@pytest.fixture(scope="module")
def model(checkpoint):
    return ["--model_id", str(checkpoint(KIND))]


@pytest.fixture(scope="module")
def video_file(model, tmp_path_factory):
    """A video that begins and ends with an image."""
    out = tmp_path_factory.mktemp("generate") / "video.mp4"
    assert cli.run(generate, [*model, "--prompt", PROMPT, *IMAGES, *SETTINGS, "--output", str(out)]) == 0
    return out


def read(path):
    """Return the frames of a file, uint8 [T, H, W, 3], and its sound, float32 [2, samples], with their streams."""
    with av.open(str(path)) as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    with av.open(str(path)) as file:
        blocks = [block.to_ndarray() for block in file.decode(audio=0)] if file.streams.audio else []
        streams = [(stream.type, float(stream.duration * stream.time_base)) for stream in file.streams]
        rates = [stream.rate for stream in file.streams.audio]
    return np.stack(frames), np.concatenate(blocks, axis=1) if blocks else None, dict(streams), rates


@pytest.mark.thorough
def test_generate_writes_a_video_with_sound(video_file):
    frames, sound, seconds, rates = read(video_file)
    assert frames.shape == (124, 32, 64, 3) and rates == [32000]
    assert seconds["video"] == pytest.approx(124 / 24, abs=1e-3)
    # As in diffusers, the sound is as long as its latents; AAC fills its last block up.
    assert LATENTS * 800 <= sound.shape[1] < LATENTS * 800 + 2 * 1024
    assert abs(seconds["audio"] - seconds["video"]) < 0.05
    assert sound.std(axis=1).min() > 1e-3
    record = json.loads(video_file.with_suffix(".json").read_text())
    assert [stage["stage"] for stage in record["stages"]] == ["encoder", "denoise", "decoder"]
    assert [step["step"] for step in record["steps"]] == [1, 2]
    assert all(stage["tflops_per_s"] > 0 for stage in record["stages"])


@pytest.mark.thorough
def test_stages_with_files_between_them_make_the_same_video(video_file, model, tmp_path):
    where = ["--input_dir", str(tmp_path), "--dp", "1"]
    assert cli.run(staged.encode, [*model, "--prompt", PROMPT, *IMAGES, *SETTINGS, "--output_dir", str(tmp_path)]) == 0
    assert cli.run(staged.denoise, where) == 0
    assert load_value(DenoiseState, tmp_path / staged.LATENTS)[0].step == 2
    assert cli.run(staged.decode, where) == 0
    assert (tmp_path / "video.mp4").read_bytes() == video_file.read_bytes()


@pytest.mark.thorough
def test_batch_makes_videos_of_both_images_of_one_and_of_none(video_file, model, tmp_path):
    fields = {"prompt": PROMPT, "height": 32, "width": 64, "steps": 2, "seed": 3}
    lines = [
        fields | {"id": "both", "image": str(PHOTO), "last_image": str(PHOTO)},
        fields | {"id": "last", "last_image": str(PHOTO), "prompt": ""},
        fields | {"id": "silent", "generate_audio": False},
        fields | {"id": "empty", "prompt": ""},
    ]
    manifest, output = tmp_path / "requests.jsonl", tmp_path / "out"
    manifest.write_text("\n".join(map(json.dumps, lines)))
    assert cli.run(batch, [*model, *MESH, "--manifest", str(manifest), "--output", str(output)]) == 1
    assert (output / "both.mp4").read_bytes() == video_file.read_bytes()
    assert read(output / "last.mp4")[1] is not None and read(output / "silent.mp4")[1] is None
    assert not (output / "empty.mp4").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--prompt", ""], "prompt is empty, but this model needs a prompt or an image"),
        (["--frames", "120"], "frames is 120; it must be 17n + 107, nearest 124"),
        (["--frames", "379"], "up to 362, nearest 362"),
        (["--size", "112x64"], "needs a multiple of 32, nearest 128"),
        (["--fps", "30"], "supports only 24: leave it out"),
        (["--guidance_scale", "3"], "doesn't use it: leave it out"),
        (["--solver", "unipc"], "choose one of euler"),
    ],
)
def test_request_that_the_model_can_not_make_is_one_line(change, message, model, tmp_path, capsys):
    command = [*model, "--prompt", PROMPT, *SETTINGS, "--output", str(tmp_path / "video.mp4")]
    capsys.readouterr()
    assert cli.run(generate, [*command, *change]) == 2
    output = capsys.readouterr().err
    assert message in output and output.count("\n") == 1
