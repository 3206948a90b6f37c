"""A service of another family's model on an emulated cluster: the same client, its own sizes, steps and refusals."""

import json
import shutil

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

# Its parts have tests of their own; a second service is too much for two cores beside others. Of the families with
# sound, test_sound.py shows the service's part, and slices/test_sound_on_pools.py that of the slices.
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
    files = PipelineSettings(str(model), str(tmp_path / "snapshots"), dtype="float32")
    spec = PipelineSpec(Layout.parse(LAYOUT, "the service's layout"), files, open_spec(model), lasting=True)
    settings = ServiceSettings(
        database=str(tmp_path / "jobs.sqlite"), storage=str(tmp_path / "results"), model=model.name
    )
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
    command = ["--model_id", model, "--prompt", "A cat looks.", "--size", "96x64", "--seed", "5", "--image", PHOTO]
    command += ["--frames", "9", "--steps", "3", "--solver", "dpm", "--dtype", "float32"]
    command += ["--dp", "1", "--sp", "1", "--tp", "1", "--output", alone]
    assert run(generate, list(map(str, command))) == 0
    assert alone.read_bytes() == video
    assert json.loads(alone.with_suffix(".json").read_text())["request"]["solver"] == "dpm"
