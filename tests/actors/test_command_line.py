"""The command line itself: what is misspelt is answered with what was meant."""

import shlex

import pytest

from actors.cli import main
from cluster.emulation.cluster import EmulatedCluster, emulated_slices
from cluster.layout import Layout
from tests.conftest import ROOT

SMALL = ROOT / "examples" / "small-wan2.2-i2v"


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


BRINGS_UP = ["--layout", "emulated-small", "--model", str(SMALL)]


@pytest.mark.parametrize(
    "argv",
    [
        ["status"],
        ["pipeline", "up", *BRINGS_UP],
        ["pipeline", "down"],
        ["serve", *BRINGS_UP],
        ["serve", "--down"],
        ["submit", "--manifest", "in.jsonl", "--output", "out", *BRINGS_UP],
        ["drive", "--manifest", "in.jsonl", "--output", "out", *BRINGS_UP],
        ["profile", "all", "--output", "out"],
    ],
    ids=lambda argv: " ".join(argv[:2]),
)
def test_advice_to_start_a_cluster_works_as_it_is_typed(argv, tmp_path, capsys, monkeypatch):
    started = []
    monkeypatch.setattr(EmulatedCluster, "start", lambda *args, **named: started.append((args, named)) or Started())
    folder = tmp_path / "my state"
    assert main([*argv, "--folder", str(folder)]) == 2
    message = capsys.readouterr().err
    assert f"no emulated cluster in {folder}; " in message
    assert main(shlex.split(message.partition("wan-tpu ")[2])) == 0
    [((slices, _), named)] = started
    assert named["folder"] == folder
    expected = Layout.load("emulated-small" if "emulated-small" in argv else "emulated-demo")
    assert slices == emulated_slices(expected)
    assert not folder.exists()


class Started:
    address = dashboard = "127.0.0.1:1"
