"""`wan-tpu generate` after it was interrupted: the same command goes on where the first one was."""

import json
import os
import signal
import threading
import time

import pytest

from tests.conftest import PHOTO, ROOT
from wan_tpu.commands import unfinished
from wan_tpu.commands.generate import generate
from wan_tpu.data import DenoiseState, load_value
from wan_tpu.errors import InvalidInput

STEPS = 40
MODEL = ["--model", str(ROOT / "examples" / "small-wan2.2-i2v"), "--dtype", "float32"]
SMALL = [*MODEL, "--image", str(PHOTO), "--size", "48x32", "--frames", "5", "--steps", str(STEPS), "--prompt", "a cat"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return the folder of unfinished videos, in which each state is kept."""
    monkeypatch.setenv("WAN_TPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(unfinished, "EVERY_S", 0.0)
    return tmp_path / "cache" / "unfinished"


def interrupt_at(folder, step):
    """Press Ctrl-C once a state after so many steps is kept."""

    def watch():
        while True:
            for file in folder.glob("*/state.safetensors"):
                try:
                    state, _ = load_value(DenoiseState, file)
                except InvalidInput:  # It is being replaced.
                    continue
                if state.step >= step:
                    os.kill(os.getpid(), signal.SIGINT)
                    return
            time.sleep(0.002)

    threading.Thread(target=watch, daemon=True).start()


@pytest.mark.long
def test_interrupted_command_goes_on_and_makes_the_same_video(tmp_path, cache):
    whole, resumed = tmp_path / "whole.mp4", tmp_path / "resumed.mp4"
    generate([*SMALL, "--output", str(whole)])
    assert not list(cache.iterdir())
    interrupt_at(cache, 3)
    with pytest.raises(KeyboardInterrupt):
        generate([*SMALL, "--output", str(resumed)])
    assert not resumed.exists()
    generate([*SMALL, "--output", str(resumed)])
    record = json.loads(resumed.with_suffix(".json").read_text())
    assert 3 <= record["resumed_at"] < STEPS and len(record["steps"]) == STEPS - record["resumed_at"]
    assert "encoder" not in [stage["stage"] for stage in record["stages"]]
    assert resumed.read_bytes() == whole.read_bytes()
    assert not list(cache.iterdir())

    interrupt_at(cache, 3)
    with pytest.raises(KeyboardInterrupt):
        generate([*SMALL, "--output", str(tmp_path / "other.mp4")])
    generate([*SMALL, "--seed", "1", "--output", str(tmp_path / "other.mp4")])  # Another video.
    assert json.loads((tmp_path / "other.json").read_text())["resumed_at"] == 0
