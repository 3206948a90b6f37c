"""A service of another family's model on an emulated cluster: the same client, its own sizes, steps and refusals."""

import json
import shutil

import httpx
import openai
import pytest

from actors.api.settings import ServiceSettings
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from cluster.layout import Layout
from tests.actors.on_service.conftest import deploy_emulated
from tests.actors.on_service.test_service import SECONDS, poll
from tests.conftest import PHOTO
from wan_tpu.cli import run
from wan_tpu.commands.generate import generate
from wan_tpu.families import open_spec

# Its parts have tests of their own; a second service, and a third, are too much for two cores beside others.
pytestmark = pytest.mark.thorough

LAYOUT = """
emulate: {devices_per_host: 1}
pools:
  encoder-decoder: {stages: [encoder, decoder], slice: v6e-1}
  denoise: {stages: [denoise], slice: v6e-1}
"""
FIELDS = {"num_frames": "9", "num_inference_steps": "3", "seed": "5", "solver": "dpm"}


def test_openai_s_client_gets_cogvideox_s_video(checkpoint, tmp_path, forks):
    model = shutil.copytree(checkpoint("cogvideox1.5-5b-i2v"), tmp_path / "small-cog")
    settings, spec = specify(model, tmp_path, LAYOUT)
    with deploy_emulated(settings, spec, tmp_path, forks) as online, online.client(timeout=SECONDS) as client:
        fields = {"prompt": "A cat looks.", "size": "96x64", "input_reference": PHOTO}
        job = poll(client, client.videos.create(**fields, extra_body=FIELDS))
        assert (job.status, job.size) == ("completed", "96x64"), job.error
        assert set(job.stage_seconds) == {"encoder", "denoise", "decoder"}
        video = client.videos.download_content(job.id).content
        for field, allowed in (
            ({"num_frames": "10"}, "9"),
            ({"solver": "unipc"}, "ddim"),
            ({"guidance_scale_2": "3"}, "guidance_scale"),
        ):
            with pytest.raises(openai.BadRequestError, match=allowed):
                client.videos.create(**fields, extra_body=FIELDS | field)
        with pytest.raises(openai.BadRequestError, match="image"):
            client.videos.create(prompt="Nobody.", size="96x64", extra_body=FIELDS)
    alone = tmp_path / "alone.mp4"
    generate_alone(model, alone, fields, "--image", PHOTO, "--frames", "9", "--steps", "3", "--solver", "dpm")
    assert alone.read_bytes() == video
    assert json.loads(alone.with_suffix(".json").read_text())["request"]["solver"] == "dpm"


def specify(model, folder, layout):
    """The settings and the pipeline of a service of a model, whose files lie in a folder."""
    files = PipelineSettings(str(model), str(folder / "snapshots"), dtype="float32")
    settings = ServiceSettings(database=str(folder / "jobs.sqlite"), storage=str(folder / "results"), model=model.name)
    return settings, PipelineSpec(Layout.parse(layout, "the service's layout"), files, open_spec(model), lasting=True)


def generate_alone(model, file, fields, *options):
    """Have the same video made without a service."""
    command = ["--model_id", model, "--prompt", fields["prompt"], "--size", fields["size"], "--seed", "5", *options]
    command += ["--dtype", "float32", "--dp", "1", "--sp", "1", "--tp", "1", "--output", file]
    assert run(generate, list(map(str, command))) == 0


SOUND_LAYOUT = """
emulate: {{devices_per_host: 1}}
pools:
  text: {{stages: [encoder], slice: v6e-1}}
  video: {{stages: [{others}], slice: v6e-1}}
"""


def test_openai_s_client_gets_ltx_2_s_video_with_sound(checkpoint, tmp_path, forks):
    model = shutil.copytree(checkpoint("ltx-2.3-distilled"), tmp_path / "small-ltx")
    settings, spec = specify(model, tmp_path, SOUND_LAYOUT.format(others="denoise, refine, decoder"))
    fields = {"num_frames": "9", "seed": "5"}
    with deploy_emulated(settings, spec, tmp_path, forks) as online, online.client(timeout=SECONDS) as client:
        video = {"prompt": "A cat purrs.", "size": "128x64"}
        jobs = [
            poll(client, client.videos.create(**video, extra_body=fields | more))
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
                client.videos.create(**video, extra_body=fields | change)
    assert b"mp4a" in with_sound and b"mp4a" not in silent
    for content, more in ((with_sound, []), (silent, ["--no-generate-audio"])):
        alone = tmp_path / f"alone{len(more)}.mp4"
        generate_alone(model, alone, video, "--frames", "9", *more)
        assert alone.read_bytes() == content


def test_minimax_h3_s_video_has_sound_and_both_frames_and_its_name_is_told(checkpoint, tmp_path, forks):
    model = shutil.copytree(checkpoint("minimax-h3"), tmp_path / "small-h3")
    settings, spec = specify(model, tmp_path, SOUND_LAYOUT.format(others="denoise, decoder"))
    fields = {"prompt": "A cat purrs.", "size": "64x32", "seconds": "5", "num_inference_steps": "3", "seed": "5"}
    pictures = {name: ("cat.png", PHOTO.read_bytes()) for name in ("input_reference", "last_frame")}
    with deploy_emulated(settings, spec, tmp_path, forks) as online, online.client(timeout=SECONDS) as client:
        ids = [
            httpx.post(f"{online.address}/v1/videos", data=fields, files=images, timeout=SECONDS).json()["id"]
            for images in (pictures, {"input_reference": pictures["input_reference"]})
        ]
        jobs = [poll(client, client.videos.retrieve(id)) for id in ids]
        videos = [client.videos.download_content(job.id).content for job in jobs]
        assert client.models.retrieve("small-h3").display_name == "MiniMax H3"
    for job in jobs:
        assert (job.status, job.size, job.seconds) == ("completed", "64x32", "5.17"), job.error
        assert (job.num_frames, job.fps, job.generate_audio) == (124, 24, True)
        assert set(job.stage_seconds) == {"encoder", "denoise", "decoder"}
    for content, more in zip(videos, (["--last_image", PHOTO], []), strict=True):
        alone = tmp_path / f"alone{len(more)}.mp4"
        generate_alone(model, alone, fields, "--steps", "3", "--image", PHOTO, *more)
        assert alone.read_bytes() == content and b"mp4a" in content
