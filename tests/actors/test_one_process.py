"""The one-process pipeline as an engine, with real (small) models."""

import asyncio
import io
import json
import time

import numpy as np
import pytest
from PIL import Image

from actors.batch.one_process import OneProcessEngine
from actors.commands.batch import batch
from actors.engine import GeneratedVideo
from actors.observe.timeline import compute_figures
from tests.conftest import PHOTO
from tests.waiting import wait_for
from wan_tpu import GenerationRequest, InvalidInput, cli
from wan_tpu.media.reading import read_frames
from wan_tpu.storage.opening import open_storage

KIND = "wan2.2-i2v-a14b"
FIELDS = {"prompt": "A cat", "height": 32, "width": 48, "frames": 1, "steps": 4, "guidance_scale": 1, "fps": 8}


@pytest.fixture(scope="module")
def engine(pipeline):
    engine = OneProcessEngine(pipeline(KIND))
    yield engine
    engine.close()


def generate(engine, request, spans=None, on_fragment=None):
    plan, on_event = engine.model.plan(request), ([] if spans is None else spans).append
    work = engine.generate(plan, id="cat", on_event=on_event, on_fragment=on_fragment)
    return asyncio.run(asyncio.wait_for(work, 120))


def test_one_process_engine_generates_the_pipeline_s_video(engine, pipeline, tmp_path):
    request, spans = GenerationRequest(**FIELDS, image=PHOTO), []
    video = generate(engine, request, spans)
    frames = pipeline(KIND).generate(request)
    assert video == GeneratedVideo(frames.save(tmp_path / "video.mp4").read_bytes())
    assert np.array_equal(video.last_frame, frames.frames[-1])
    compute = [(span.stage, span.step) for span in spans if span.kind == "compute"]
    high = [step for stage, step in compute if stage == "denoise_high"]
    assert compute[0] == ("encoder", None)
    assert compute[-1] == ("decoder", None)
    assert [step for _, step in compute[1:-1]] == [1, 2, 3, 4]
    assert 0 < len(high) < 4
    assert {span.chips for span in spans} == {"emulated"}
    assert all(span.seconds > 0 for span in spans)
    figures = compute_figures(spans)
    assert 0 < figures.busy["this process"] < 1  # reading weights and compiling don't count
    assert figures.overlap == 0


def test_fragments_come_with_the_same_video(engine, tmp_path):
    request, fragments = GenerationRequest(**FIELDS, image=PHOTO), []

    def fail(fragment):
        fragments.append(fragment)
        raise ValueError("nobody is there")

    assert generate(engine, request, on_fragment=fail) == generate(engine, request)
    [fragment] = fragments
    assert (fragment.run, fragment.index, fragment.content[4:8]) == (0, 0, b"ftyp")
    (tmp_path / "video.mp4").write_bytes(fragment.content)
    assert len(read_frames(tmp_path / "video.mp4", 1)) == 1


def test_previews_come_with_the_same_video(engine, pipeline):
    pipeline(KIND).painter.prepare()  # Fitting colours takes longer than these steps.
    plan, pictures = engine.model.plan(GenerationRequest(**FIELDS, image=PHOTO)), []

    def wait_before_the_end(span):
        if span.step == 3:
            wait_for(lambda: pictures)

    work = engine.generate(plan, id="cat", on_event=wait_before_the_end, on_preview=pictures.append)
    assert asyncio.run(work) == generate(engine, GenerationRequest(**FIELDS, image=PHOTO))
    assert {picture.step for picture in pictures} <= set(plan.preview_steps)
    assert Image.open(io.BytesIO(pictures[0].jpeg)).format == "JPEG"


def test_error_of_a_stage_reaches_the_caller(engine):
    with pytest.raises(InvalidInput, match="/nowhere"):
        generate(engine, GenerationRequest(**FIELDS, image=PHOTO, loras=["/nowhere.safetensors"]))


def test_cancelled_work_ends_before_the_next_begins(engine):
    """Long enough not to end by itself in time; and the engine is free afterwards."""
    plan = engine.model.plan(GenerationRequest(**FIELDS | {"steps": 1000}, image=PHOTO))

    async def cancel():
        spans = []
        work = asyncio.ensure_future(engine.generate(plan, id="long", on_event=spans.append))
        while not any(span.step for span in spans):
            await asyncio.sleep(0.02)
        queued = asyncio.ensure_future(engine.generate(plan, id="queued", on_event=spans.append))
        await asyncio.sleep(0.05)
        queued.cancel()
        start = time.monotonic()
        work.cancel()
        results = await asyncio.gather(work, queued, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert time.monotonic() - start < 10
        steps = len(spans)
        await asyncio.sleep(0.3)
        assert len(spans) == steps < 900
        assert {span.request for span in spans} == {"long"}

    asyncio.run(asyncio.wait_for(cancel(), 120))
    assert generate(engine, GenerationRequest(**FIELDS, image=PHOTO)).mp4[4:8] == b"ftyp"


def test_batch_command_writes_videos_records_and_a_timeline(checkpoint, tmp_path, capfd):
    """As typed: videos, records, a timeline, and exit codes."""
    lines = [FIELDS | {"id": "cat", "image": str(PHOTO)}, FIELDS | {"id": "dog"}, FIELDS | {"id": "cat"}]
    manifest = tmp_path / "requests.jsonl"
    manifest.write_text("\n".join(map(json.dumps, lines)))
    output = tmp_path / "out"
    command = ["--model_id", str(checkpoint(KIND)), "--dtype", "float32", "--dp", "1"]
    command += ["--manifest", str(manifest), "--output", str(output)]
    assert cli.run(batch, [*command, "--timeline"]) == 1
    assert list(open_storage(output).list()) == [
        "cat.json",
        "cat.mp4",
        "results.jsonl",
        "timeline.png",
        "timeline.trace.json",
    ]
    messages = capfd.readouterr().err
    assert "dog: line 2 " in messages
    assert "batch: 1/1" in messages
    assert "error: 3 requests: 1 made, 2 bad lines" in messages
    record = json.loads((output / "cat.json").read_text())
    assert list(record["stage_s"]) == ["encoder", "denoise_high", "denoise_low", "decoder"]
    assert (record["model"], record["precision"]) == (str(checkpoint(KIND)), "float32")
    manifest.write_text(json.dumps(lines[0]))
    assert cli.run(batch, command) == 0
    assert "1 requests: 0 made, 1 done before" in capfd.readouterr().err
    manifest.write_text(json.dumps(lines[1]))
    assert cli.run(batch, command) == 2
    assert cli.run(batch, [*command, "--in_flight", "0"]) == 2
