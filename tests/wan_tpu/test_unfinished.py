"""`wan-tpu generate` after it was interrupted: the same command goes on where the first one was."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import threading
import time

import jax
import pytest

from tests.conftest import PHOTO, ROOT
from wan_tpu.commands import unfinished
from wan_tpu.commands.generate import generate
from wan_tpu.data import Conditioning, DenoiseState, load_value
from wan_tpu.errors import InvalidInput
from wan_tpu.pipeline import load_pipeline
from wan_tpu.request import GenerationRequest

STEPS = 40
SMALL = ["--dtype", "float32", "--size", "48x32", "--frames", "5", "--steps", str(STEPS), "--prompt", "a cat"]


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
def test_interrupted_command_goes_on_and_makes_the_same_video(checkpoint, tmp_path, cache):
    whole, resumed = tmp_path / "whole.mp4", tmp_path / "resumed.mp4"
    command = ["--model", str(checkpoint("wan2.1-t2v-1.3b")), *SMALL]
    generate([*command, "--output", str(whole)])
    assert not list(cache.iterdir())
    interrupt_at(cache, 3)
    with pytest.raises(KeyboardInterrupt):
        generate([*command, "--output", str(resumed)])
    assert not resumed.exists()
    generate([*command, "--output", str(resumed)])
    record = json.loads(resumed.with_suffix(".json").read_text())
    assert 3 <= record["resumed_at"] < STEPS and len(record["steps"]) == STEPS - record["resumed_at"]
    assert "encoder" not in [stage["stage"] for stage in record["stages"]]
    assert resumed.read_bytes() == whole.read_bytes()
    assert not list(cache.iterdir())


def test_state_belongs_to_its_request_and_weights(tmp_path, cache):
    folder = shutil.copytree(ROOT / "examples" / "small-wan2.2-i2v", tmp_path / "model")
    pipe = load_pipeline(folder, dtype="float32")
    request = pipe.plan(GenerationRequest(prompt="a cat", image=str(PHOTO), height=32, width=48, frames=5)).request
    before = unfinished._folder_of(pipe, request)
    assert unfinished._folder_of(pipe, request) == before
    assert unfinished._folder_of(pipe, dataclasses.replace(request, seed=request.seed + 1)) != before
    file = folder / "transformer_2" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes())
    assert unfinished._folder_of(pipe, request) != before


def test_folders_of_running_processes_stay(tmp_path):
    folders = [tmp_path / str(number) for number in range(10)]
    with contextlib.ExitStack() as opened:
        running = unfinished._open(folders[0], opened)
        os.utime(running, (1, 1))
        for folder in folders[1:]:
            with contextlib.ExitStack() as ended:
                unfinished._open(folder, ended)
        assert sorted(tmp_path.iterdir()) == [folders[0], *folders[2:]]


def test_a_defect_while_a_state_is_kept_is_logged(tmp_path, caplog):
    kept = unfinished.Unfinished(tmp_path)
    gone = jax.numpy.zeros((1, 1))
    gone.delete()
    kept._keep(tmp_path, Conditioning({"text": gone}), None, ())
    assert kept._is_broken and "deleted" in caplog.text
