"""A line of several segments becomes one video, by the motion or the last frame of each segment."""

import dataclasses
import json

import numpy as np
import pytest

from actors.batch.lines import RESULTS
from actors.batch.manifest import read_manifest
from actors.batch.run import open_batch
from actors.batch.segments import name_segment
from tests.actors.api.serving import Engine, make_tail
from tests.actors.api.test_extensions import packets
from tests.actors.small_spec import MOTION_SPEC, SPEC, MotionSpec
from tests.conftest import PHOTO
from tests.wan_tpu.minimax_h3_ref2va import write_sound
from wan_tpu.families import open_spec
from wan_tpu.families.minimax_h3.small import make_checkpoint
from wan_tpu.families.wan.published import PUBLISHED
from wan_tpu.media.video import VideoWriter
from wan_tpu.storage.local import LocalStorage


@pytest.fixture
def run(tmp_path):
    """Makes a line's video; returns the report, the engine and the output."""

    def run(spec, engine=None, **line):
        path, output = tmp_path / "requests.jsonl", LocalStorage(tmp_path / "videos")
        path.write_text(json.dumps({"id": "cat", "prompt": "a cat", "seed": 5} | line))
        engine = engine or Engine(tmp_path)
        engine.model = spec
        with open_batch(read_manifest(path, spec), output, tell=lambda text: None) as batch:
            return batch.run(engine), engine, output

    return run


@pytest.mark.parametrize(
    ("spec", "fields", "written"),
    [
        (MOTION_SPEC, {}, [(0, 34), (17, 17), (17, 22)]),
        (MOTION_SPEC, {"continue_by": "frame"}, [(0, 39), (1, 38), (1, 38)]),
        (SPEC, {}, [(0, 9), (1, 8), (1, 8)]),
    ],
)
def test_segments_become_one_video(spec, fields, written, run):
    report, engine, output = run(spec, next_prompts=["it falls", "it lies"], **fields)
    assert (report.exit_code, report.videos_made) == (0, 1), output.read(RESULTS)
    assert [(request.prompt, request.seed) for request in engine.requests] == [
        ("a cat", 5),
        ("it falls", 6),
        ("it lies", 7),
    ]
    segments = [packets(engine.video(request)) for request in engine.requests]
    hidden = [request.hidden_frames for request in engine.requests]
    assert list(zip(hidden, map(len, segments), strict=True)) == written
    assert packets(output.read("cat.mp4")) == [packet for segment in segments for packet in segment]
    for before, request in zip(engine.requests[:-1], engine.requests[1:], strict=True):
        if hidden[1] == 17:
            assert (request.references[-1].source.latents == make_tail(before).latents).all()
        else:
            assert request.image.size == (96, 64) and request.references is None


def test_only_the_first_segment_begins_with_a_given_video(run, tmp_path):
    with VideoWriter(tmp_path / "before.mp4", fps=24, overwrite=True) as writer:
        writer.set_audio(np.zeros((2, 39000), np.float32), 24000)
        writer.write([np.full((64, 96, 3), 200, np.uint8)] * 39)
    line = {"references": ["image:" + str(PHOTO), "continued:before.mp4"], "next_prompts": ["on", "and on"]}
    report, engine, output = run(MOTION_SPEC, height=64, width=96, **line)
    assert report.exit_code == 0, output.read(RESULTS)
    kinds = [[reference.kind for reference in request.references] for request in engine.requests]
    assert kinds == [["image", "continued"], ["image", "tail"], ["image", "tail"]]
    assert [request.hidden_frames for request in engine.requests[1:]] == [17, 17]


class OpenSpec(MotionSpec):
    """A spec of a model that chooses the length of a video whose request has none."""

    chooses_length = True

    def shorten(self, request, seconds):
        return dataclasses.replace(request, frames=17 * round(request.fps * seconds / 17) + 5)


def test_segments_of_a_line_without_a_length_have_the_usual_one(run):
    report, engine, output = run(OpenSpec(PUBLISHED["wan2.2-t2v-a14b"]), next_prompts=["it falls"])
    assert report.exit_code == 0, output.read(RESULTS)
    assert [(request.frames, request.max_seconds) for request in engine.requests] == [(39, None)] * 2


def test_each_segment_has_an_id_of_its_line_alone(run, tmp_path):
    _, engine, _ = run(MOTION_SPEC, next_prompts=["it falls", "it lies"])
    [entry] = read_manifest(tmp_path / "requests.jsonl", MOTION_SPEC).entries
    assert engine.ids == [name_segment(entry, index) for index in range(3)]
    assert len(set(engine.ids)) == 3 and engine.ids[0] == "cat"
    assert engine.forgotten == engine.ids  # Or their snapshots would stay.


class EngineWithSnapshots(Engine):
    """Goes on from snapshots of an earlier version, which lack a segment's end, until they are forgotten."""

    async def generate(self, plan, *, id, **options):
        video = await super().generate(plan, id=id, **options)
        return video if id in self.forgotten else dataclasses.replace(video, tail=None)


def test_a_snapshot_that_lacks_the_end_of_a_segment_is_used_once(run, tmp_path):
    engine = EngineWithSnapshots(tmp_path)
    assert run(MOTION_SPEC, engine, next_prompts=["it falls"])[0].count("failed") == 1
    assert run(MOTION_SPEC, engine, next_prompts=["it falls"])[0].count("done") == 1


def test_what_cant_be_made_is_refused(run, tmp_path):
    write_sound(tmp_path / "song.wav", 3)
    for spec, fields in (
        (MOTION_SPEC, {"continue_by": "frame"}),
        (MOTION_SPEC, {"next_prompts": "on"}),
        (MOTION_SPEC, {"next_prompts": ["on"], "continue_by": "sound"}),
        (SPEC, {"next_prompts": ["on"], "continue_by": "motion"}),
        (SPEC, {"next_prompts": ["on"], "frames": 1}),
        (MOTION_SPEC, {"next_prompts": ["on"], "references": ["soundtrack:song.wav"]}),
    ):
        report, engine, _ = run(spec, id="dog", **fields)
        assert report.count("invalid") and not engine.requests, fields  # Known before there is an engine.


def test_a_later_prompt_that_is_refused_costs_no_other_line(tmp_path):
    path = tmp_path / "requests.jsonl"
    prompts = ["word " * 5000], ["it falls"], ["word " * 5000]
    path.write_text(
        "\n".join(
            json.dumps({"prompt": "a", "seed": i, "next_prompts": p, "truncate_prompt": False})
            for i, p in enumerate(prompts)
        )
    )
    manifest = read_manifest(path, open_spec(make_checkpoint(tmp_path / "h3")))
    assert [entry.seed for entry in manifest.entries] == [1]
    assert all("next_prompts, number 1" in bad.reason for bad in manifest.bad)
