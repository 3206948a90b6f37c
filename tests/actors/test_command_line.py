"""The command line itself: what is misspelt is answered with what was meant."""

import pytest

from actors.cli import main


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["genrate"], "there is no 'genrate' (did you mean generate?)"),
        (["generate", "--ckpt_dir", "wan"], "there is no --ckpt_dir (did you mean --model?)"),
        (["generate", "--model-id", "wan", "--num_inference_steps=4"], "(did you mean --steps?)"),
        (["generate", "--model", "wan", "--precision", "int8_attention"], "(did you mean int8-attention?)"),
        (["plan", "--model", "wan2.2-i2v-14b"], "(did you mean wan2.2-i2v-a14b?)"),
        (["plan", "--model-id", "wan2.1-t2v-14b", "--preset", "lightening", "--layout", "four-pools"], "lightning?"),
        (["plan", "--model", "wan2.1-t2v-14b", "--layout", "one_machine"], "(did you mean one-machine?)"),
        (["cluster", "up", "--emulate", "emulated_dmo"], "(did you mean emulated-demo?)"),
        (["cluster", "dwn"], "(did you mean down?)"),
        (["keys", "limit", "ann", "--per-minutes", "3"], "(did you mean --per_minute?)"),
        (["serve", "--largest_size", "720*1280*81"], "(did you mean --largest?)"),
    ],
)
def test_what_is_misspelt_is_answered_with_what_was_meant(argv, hint, capsys):
    assert main(argv) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and hint in line
