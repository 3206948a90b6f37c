"""The gate's own arithmetic and files, with rendered clips in place of a model's."""

import json

import numpy as np
import pytest
from PIL import Image

from scripts.demo_model import gate
from scripts.demo_model.scenes import caption, first_frame, render
from scripts.demo_model.score import SUB_SCORES

COUNT = 3


def renderer(scenes):
    """Return what makes the true clip of each request for one of `scenes`, found by its sentence and picture."""
    clips = {(caption(scene), first_frame(scene).tobytes()): render(scene) / np.float32(255) for scene in scenes}
    return lambda request: clips[request.prompt, np.asarray(request.image).tobytes()]


@pytest.mark.long
def test_true_clips_pass_and_files_say_so(tmp_path):
    scenes = gate.held_out_scenes(COUNT)
    other_way = gate.make_opposites(scenes)
    generate = renderer([*scenes, *other_way])
    lines = []
    clips = gate.make_clips(generate, scenes, gate.Sampling(), lines.append)
    figures = gate.compute_figures(clips, gate.make_clips(generate, other_way, gate.Sampling(), lines.append))
    assert {figures[name].value for name in ("score", "sentence", *SUB_SCORES)} == {1.0}
    assert lines == [f"{COUNT} of {COUNT} clips, 100 % of sub-scores right"] * 2
    gate.write(tmp_path, clips, figures)
    assert json.loads((tmp_path / "figures.json").read_text())["requests"] == COUNT
    first = json.loads((tmp_path / "clips.jsonl").read_text().splitlines()[0])
    assert first["caption"] == caption(scenes[0])
    assert Image.open(tmp_path / "worst.png").height > COUNT * 64
    assert "| direction | 100 (" in gate.format_table(figures)


def test_a_black_clip_can_be_written_too(tmp_path):
    scenes = gate.held_out_scenes(2)
    clips = gate.make_clips(
        lambda request: np.zeros((17, 64, request.width, 3), np.float32), scenes, gate.Sampling(), str
    )
    figures = gate.compute_figures(clips)
    gate.write(tmp_path, clips, figures)
    assert figures["score"].value == 0
    assert json.loads((tmp_path / "clips.jsonl").read_text().splitlines()[0])["colour"] is False


def test_a_model_that_ignores_sentences_fails_that_figure():
    scenes = gate.held_out_scenes(COUNT)
    clips = gate.make_clips(renderer(scenes), scenes, gate.Sampling(), str)
    deaf = [
        gate.ScoredClip(s, m.clip, gate.score(m.clip, s))
        for s, m in zip(gate.make_opposites(scenes), clips, strict=True)
    ]
    assert gate.compute_figures(clips, deaf)["sentence"].value == 0


def test_requests_are_what_was_held_out():
    scenes = gate.held_out_scenes(COUNT, width=96)
    assert all(scene.held_out for scene in scenes)
    request = gate.request_of(scenes[0], 3, gate.Sampling(steps=4, guidance=2.0))
    assert (request.height, request.width, request.frames, request.steps, request.seed) == (64, 96, 17, 4, 3)
    assert request.shift is None  # the checkpoint's
    assert gate.held_out_scenes(3) == gate.held_out_scenes(COUNT)[:3]
