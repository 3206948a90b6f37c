"""A service of another family's model on an emulated cluster: the same client, its own sizes, steps and refusals."""

import json
import shutil

import httpx
import openai
import pytest

from actors.api.settings import ServiceSettings
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from cluster.layout import Layout
from tests.actors.on_service.conftest import deployed
from tests.actors.on_service.test_service import SECONDS, poll
from tests.conftest import PHOTO
from wan_tpu.cli import run
from wan_tpu.commands.generate import generate
from wan_tpu.families import open_spec

# Its parts have tests of their own; a second service, and a third, are too much for two cores beside others.
pytestmark = pytest.mark.soak

LAYOUT = Layout.parse(
    """
emulate: {devices_per_host: 1}
pools:
  ends: {stages: [encoder, decoder], slice: v6e-1}
  denoise: {stages: [denoise], slice: v6e-1}
""",
    "the service's layout",
)
FIELDS = {"num_frames": "9", "num_inference_steps": "3", "seed": "5", "solver": "dpm"}


def test_openai_s_client_gets_cogvideox_s_video(checkpoint, tmp_path, forks):
    model = shutil.copytree(checkpoint("cogvideox1.5-5b-i2v"), tmp_path / "small-cog")
    files = PipelineSettings(str(model), str(tmp_path / "snapshots"), dtype="float32")
    settings = ServiceSettings(
        database=str(tmp_path / "jobs.sqlite"), storage=str(tmp_path / "results"), model="small-cog"
    )
    spec = PipelineSpec(LAYOUT, files, open_spec(model), lasting=True)
    with deployed(settings, spec, tmp_path, forks) as online, online.client(timeout=SECONDS) as client:
        asked = {"prompt": "A cat looks.", "size": "96x64", "input_reference": PHOTO}
        job = poll(client, client.videos.create(**asked, extra_body=FIELDS))
        assert (job.status, job.size) == ("completed", "96x64"), job.error
        assert set(job.stage_seconds) == {"encoder", "denoise", "decoder"}
        video = client.videos.download_content(job.id).content
        for field, allowed in (
            ({"num_frames": "10"}, "9"),
            ({"solver": "unipc"}, "ddim"),
            ({"guidance_scale_2": "3"}, "guidance_scale"),
        ):
            with pytest.raises(openai.BadRequestError, match=allowed):
                client.videos.create(**asked, extra_body=FIELDS | field)
        with pytest.raises(openai.BadRequestError, match="image"):
            client.videos.create(prompt="Nobody.", size="96x64", extra_body=FIELDS)
    alone = tmp_path / "alone.mp4"
    command = ["--model_id", str(model), "--image", str(PHOTO), "--prompt", asked["prompt"], "--size", "96x64"]
    command += ["--frames", "9", "--steps", "3", "--seed", "5", "--solver", "dpm", "--dtype", "float32"]
    assert run(generate, [*command, "--dp", "1", "--sp", "1", "--tp", "1", "--output", str(alone)]) == 0
    assert alone.read_bytes() == video
    assert json.loads(alone.with_suffix(".json").read_text())["request"]["solver"] == "dpm"


SOUND_LAYOUT = """
emulate: {{devices_per_host: 1}}
pools:
  text: {{stages: [encoder], slice: v6e-1}}
  video: {{stages: [{others}], slice: v6e-1}}
"""


def test_openai_s_client_gets_ltx_2_s_video_with_sound(checkpoint, tmp_path, forks):
    model = shutil.copytree(checkpoint("ltx-2.3-distilled"), tmp_path / "small-ltx")
    files = PipelineSettings(str(model), str(tmp_path / "snapshots"), dtype="float32")
    settings = ServiceSettings(
        database=str(tmp_path / "jobs.sqlite"), storage=str(tmp_path / "results"), model="small-ltx"
    )
    layout = Layout.parse(SOUND_LAYOUT.format(others="denoise, refine, decoder"), "the service's layout")
    spec = PipelineSpec(layout, files, open_spec(model), lasting=True)
    fields = {"num_frames": "9", "seed": "5"}
    with deployed(settings, spec, tmp_path, forks) as online, online.client(timeout=SECONDS) as client:
        asked = {"prompt": "A cat purrs.", "size": "128x64"}
        jobs = [
            poll(client, client.videos.create(**asked, extra_body=fields | more))
            for more in ({}, {"generate_audio": "false"})
        ]
        for job in jobs:
            assert (job.status, job.size) == ("completed", "128x64"), job.error
            assert set(job.stage_seconds) == {"encoder", "denoise", "refine", "decoder"}
        with_sound, silent = (client.videos.download_content(job.id).content for job in jobs)
        for change, allowed in (
            ({"num_frames": "10"}, "9"),
            ({"num_inference_steps": "20"}, "8, or 11 in two stages"),
            ({"size": "96x64"}, "multiple of 64"),
        ):
            with pytest.raises(openai.BadRequestError, match=allowed):
                client.videos.create(**asked, extra_body=fields | change)
    assert b"mp4a" in with_sound and b"mp4a" not in silent
    command = ["--model_id", str(model), "--prompt", asked["prompt"], "--size", "128x64", "--frames", "9"]
    command += ["--seed", "5", "--dtype", "float32", "--dp", "1", "--sp", "1", "--tp", "1"]
    for content, more in ((with_sound, []), (silent, ["--no-generate-audio"])):
        alone = tmp_path / f"alone{len(more)}.mp4"
        assert run(generate, [*command, *more, "--output", str(alone)]) == 0
        assert alone.read_bytes() == content


def test_minimax_h3_s_video_has_sound_and_both_frames_and_its_name_is_told(checkpoint, tmp_path, forks):
    model = shutil.copytree(checkpoint("minimax-h3"), tmp_path / "small-h3")
    files = PipelineSettings(str(model), str(tmp_path / "snapshots"), dtype="float32")
    settings = ServiceSettings(
        database=str(tmp_path / "jobs.sqlite"), storage=str(tmp_path / "results"), model="small-h3"
    )
    layout = Layout.parse(SOUND_LAYOUT.format(others="denoise, decoder"), "the service's layout")
    spec = PipelineSpec(layout, files, open_spec(model), lasting=True)
    fields = {"prompt": "A cat purrs.", "size": "64x32", "seconds": "5", "num_inference_steps": "3", "seed": "5"}
    pictures = {name: ("cat.png", PHOTO.read_bytes()) for name in ("input_reference", "last_frame")}
    with deployed(settings, spec, tmp_path, forks) as online, online.client(timeout=SECONDS) as client:
        ids = [
            httpx.post(f"{online.address}/v1/videos", data=fields, files=images, timeout=SECONDS).json()["id"]
            for images in (pictures, {"input_reference": pictures["input_reference"]})
        ]
        jobs = [poll(client, client.videos.retrieve(id)) for id in ids]
        videos = [client.videos.download_content(job.id).content for job in jobs]
        assert client.models.retrieve("small-h3").display_name == "MiniMax H3"
    for job in jobs:
        assert (job.status, job.size, job.seconds) == ("completed", "64x32", "5"), job.error
        assert (job.num_frames, job.fps, job.generate_audio) == (124, 24, True)
        assert set(job.stage_seconds) == {"encoder", "denoise", "decoder"}
    command = ["--model_id", str(model), "--prompt", fields["prompt"], "--size", "64x32", "--steps", "3"]
    command += ["--seed", "5", "--dtype", "float32", "--dp", "1", "--sp", "1", "--tp", "1", "--image", str(PHOTO)]
    for content, more in zip(videos, (["--last_image", str(PHOTO)], []), strict=True):
        alone = tmp_path / f"alone{len(more)}.mp4"
        assert run(generate, [*command, *more, "--output", str(alone)]) == 0
        assert alone.read_bytes() == content and b"mp4a" in content
