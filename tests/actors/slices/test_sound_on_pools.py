"""Models with sound on three pools, the text encoder on one of its own: LTX-2 in two stages, MiniMax-H3 with images."""

import dataclasses
import json
from pathlib import Path

import pytest

from actors.batch.manifest import read_manifest
from actors.batch.one_process import OneProcessEngine
from actors.batch.run import open_batch
from actors.pipeline.driver import PipelineDriver
from scripts.published.ltx_rules import make_adapter
from tests.actors.api.test_sound import streams
from tests.actors.on_slices.running import in_one_process
from tests.conftest import PHOTO
from wan_tpu import GenerationRequest
from wan_tpu.aot.programs import RANK
from wan_tpu.families.ltx2.published import TWO_STAGES
from wan_tpu.storage.opening import open_storage

POOLS = """
  text: {{stages: [encoder], slice: v6e-1}}
  transformer: {{stages: [{denoise}], slice: v6e-1}}
  decoder: {{stages: [decoder], slice: v6e-1}}
"""
LTX = GenerationRequest(prompt="A cat purrs", height=64, width=64, frames=9)
H3 = GenerationRequest(prompt="A cat purrs", height=32, width=64, frames=124, steps=3)
REQUESTS = {
    # The image is encoded for each stage.
    "ltx-2.3-distilled": (dataclasses.replace(LTX, image=PHOTO), LTX),
    # The first stage has guidance, and the second an adapter.
    "ltx-2.5": (dataclasses.replace(LTX, preset=TWO_STAGES, steps=5),),
    # Its text encoder reads the prompt, which all have, with the images of each.
    "minimax-h3": (
        dataclasses.replace(H3, image=PHOTO, last_image=PHOTO),
        dataclasses.replace(H3, image=PHOTO),
        H3,
        dataclasses.replace(H3, references=[f"image:{PHOTO}"], reference_size="match"),
    ),
}
STEPS = {
    "ltx-2.3-distilled": [*(("denoise", i) for i in range(1, 9)), *(("refine", i) for i in range(9, 12))],
    "ltx-2.5": [("denoise", 1), ("denoise", 2), ("refine", 3), ("refine", 4), ("refine", 5)],
    "minimax-h3": [("denoise", i) for i in range(1, 4)],
}
# Both of MiniMax-H3's transformers share a slice here; what each needs is encoded by another one.
DENOISE = dict.fromkeys(REQUESTS, "denoise, refine") | {"minimax-h3": "denoise, denoise_ref"}

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module", params=REQUESTS)
def running(request, deployed, checkpoint, tmp_path_factory):
    """A pipeline that runs, and requests for it."""
    folder, requests = checkpoint(request.param), REQUESTS[request.param]
    if request.param == "ltx-2.5":
        adapter = make_adapter(folder, tmp_path_factory.mktemp("adapter") / "distilled.safetensors", rank=RANK)
        requests = tuple(dataclasses.replace(each, loras=[f"{adapter}@refine"]) for each in requests)
    plain = requests[2:3] or requests[-1:]
    pools = POOLS.format(denoise=DENOISE[request.param])
    with deployed(folder, pools, name=request.param, warm_up=plain) as spec:
        yield spec, requests


def write_manifest(path, requests):
    lines = []
    for i, request in enumerate(requests):
        images = {name: str(PHOTO) for name in ("image", "last_image") if getattr(request, name) is not None}
        fields = {name: value for name, value in request.to_json().items() if value is not None}
        for reference in fields.get("references", ()):
            reference.clear()
            reference.update(kind="image", source=str(PHOTO))
        lines.append({**fields, **images, "id": str(i)})
    path.write_text("\n".join(map(json.dumps, lines)))


def test_batch_of_videos_with_sound_is_that_of_one_process(running, tmp_path):
    spec, requests = running
    kind, spans = spec.settings.name, []
    expected = in_one_process(spec.settings.checkpoint, requests[0], 1, tmp_path, *requests[1:])
    write_manifest(tmp_path / "requests.jsonl", requests)
    manifest = read_manifest(tmp_path / "requests.jsonl", spec.model)
    driver = PipelineDriver(spec)
    try:
        with open_batch(manifest, open_storage(tmp_path / "videos")) as batch:
            report = batch.run(driver, on_event=spans.append)
    finally:
        driver.close()
    assert report.videos_made == len(requests), list(report.results)
    videos = {name: Path(tmp_path, "videos", f"{name}.mp4").read_bytes() for name in map(str, range(len(requests)))}
    for name, video in videos.items():
        assert streams(video) == ["Video: h264", "Audio: aac"]
        steps = STEPS[kind]
        if requests[int(name)].references is not None:
            steps = [("denoise_ref", step) for _, step in steps]
        assert [(span.stage, span.step) for span in spans if span.step and span.request == name] == steps
    # All programs were compiled before the first request, but for those of references.
    compiled = [int(span.request) for span in spans if span.kind == "compile"]
    assert all(requests[index].references is not None for index in compiled)
    alone = expected()
    assert videos == {str(i): alone[f"mp4_alone_{i}" if i else "mp4_alone"].tobytes() for i in range(len(requests))}
    assert len(set(videos.values())) == len(videos)


def test_segments_with_motion_are_those_of_one_process(running, pipeline, tmp_path):
    spec, requests = running
    [plain] = requests[2:3] or requests[-1:]
    wanted = dataclasses.replace(plain, image=None, frames=max(plain.frames, 33))
    fields = {name: value for name, value in wanted.to_json().items() if value is not None}
    (tmp_path / "requests.jsonl").write_text(json.dumps({**fields, "id": "cat", "next_prompts": ["it sleeps"]}))
    manifest, videos = read_manifest(tmp_path / "requests.jsonl", spec.model), {}
    for name, engine in (("pools", PipelineDriver(spec)), ("alone", OneProcessEngine(pipeline(spec.settings.name)))):
        try:
            with open_batch(manifest, open_storage(tmp_path / name)) as batch:
                report = batch.run(engine)
        finally:
            engine.close()
        assert report.videos_made == 1, list(report.results)
        videos[name] = (tmp_path / name / "cat.mp4").read_bytes()
    assert streams(videos["pools"]) == ["Video: h264", "Audio: aac"]
    assert videos["pools"] == videos["alone"]
