"""Models with one expert behind the service, on clusters of their own: the videos are those of one process."""

import pytest

from actors.api.settings import ServiceSettings
from actors.pipeline.spec import PipelineSpec
from actors.slices.settings import PipelineSettings
from cluster.layout import Layout
from tests.actors.on_service.conftest import deployed
from tests.actors.on_slices.running import in_one_process
from wan_tpu import GenerationRequest
from wan_tpu.families import open_spec

pytestmark = pytest.mark.long

LAYOUT = Layout.parse(
    """
emulate: {devices_per_host: 1}
pools:
  ends: {stages: [encoder, decoder], slice: v6e-1}
  expert: {stages: [denoise], slice: v6e-1}
""",
    "the service's layout",
)


@pytest.mark.parametrize("kind", ["wan2.1-t2v-1.3b", "wan2.2-ti2v-5b"])
def test_a_video_is_that_of_one_process(kind, checkpoint, tmp_path):
    asked = GenerationRequest(prompt="A cat", height=64, width=64, frames=9, steps=6, seed=3)
    folder = tmp_path / "alone"
    folder.mkdir()
    expected = in_one_process(checkpoint(kind), asked, 1, folder)
    settings = PipelineSettings(str(checkpoint(kind)), str(tmp_path / "snapshots"), dtype="float32")
    spec = PipelineSpec(LAYOUT, settings, open_spec(settings.checkpoint), lasting=True)
    service = ServiceSettings(
        database=str(tmp_path / "jobs.sqlite"),
        storage=str(tmp_path / "results"),
        model=kind,
        webhook_secret_file=str(tmp_path / "secret"),
        chips=dict.fromkeys(spec.model.stages, 1),
    )
    with deployed(service, spec, tmp_path) as online, online.client() as client:
        made = client.videos.create_and_poll(
            prompt=asked.prompt,
            size="64x64",
            extra_body={"num_frames": "9", "num_inference_steps": "6", "seed": "3"},
        )
        assert made.status == "completed", made.error
        assert set(made.stage_seconds) == {"encoder", "denoise", "decoder"}
        assert client.videos.download_content(made.id).content == expected()["mp4_alone"].tobytes()
