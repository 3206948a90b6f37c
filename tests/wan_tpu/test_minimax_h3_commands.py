"""MiniMax-H3 by the commands, as a person types them: in one command, stage by stage, in a batch, and refused."""

import pytest

from wan_tpu import cli
from wan_tpu.commands.generate import generate

KIND = "minimax-h3"
PROMPT = "A cat plays the piano"
MESH = ["--dtype", "float32", "--dp", "1", "--sp", "1", "--tp", "1"]
SETTINGS = ["--size", "64x32", "--steps", "2", "--seed", "3", *MESH]


@pytest.fixture(scope="module")
def model(checkpoint):
    return ["--model_id", str(checkpoint(KIND))]


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
