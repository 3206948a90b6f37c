"""With every field of a manifest's line, the pipeline makes the same video as one process, bit for bit.

Models, leaders, drivers and the code on their hosts are real; Ray and time are simulated.
"""

import asyncio
import dataclasses
import json
import shutil

import diffusers
import numpy as np
import pytest
from PIL import Image

from actors.batch.manifest import read_manifest
from actors.batch.one_process import OneProcessEngine
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from actors.slices.stage_host import StageHost
from cluster.layout import Layout
from tests.actors.api.test_sound import streams
from tests.actors.simulation.scenario import Run
from tests.actors.simulation.virtual_time import virtual_time
from tests.actors.simulation.world import World
from tests.conftest import PHOTO
from tests.wan_tpu import adapter_files
from tests.wan_tpu.minimax_h3_ref2va import write_video
from wan_tpu import load_pipeline
from wan_tpu.data import Video
from wan_tpu.families import open_spec, published_spec
from wan_tpu.request import GenerationRequest
from wan_tpu.tiny import make_checkpoint

SIZE = {"height": 32, "width": 48, "frames": 5, "steps": 4}
READ = {"prompt": "a cat " * 100, "height": 32, "width": 64, "steps": 4}  # More than the model reads.
ONE_EXPERT = (
    "pools:\n  encoder-decoder: {stages: [encoder, decoder], slice: v6e-1}\n  all: {stages: [denoise], slice: v6e-1}\n"
)
TWO_EXPERTS = """
pools:
  encoder-decoder: {stages: [encoder, decoder], slice: v6e-1}
  high: {stages: [denoise_high], slice: v6e-1}
  low: {stages: [denoise_low], slice: v6e-1}
"""
RATES = {"encoder_rates": [2, 4, 5, 5], "decoder_rates": [5, 5, 2, 2, 2], "decoder_kernel_sizes": [9, 9, 4, 4, 4]}
FEW_SAMPLES = {"sampling_rate": 8000, "decoder_dim": 32, **RATES}
TEXT_ENCODER_APART = """
pools:
  text: {stages: [encoder], slice: v6e-1}
  transformer: {stages: [denoise], slice: v6e-1}
  references: {stages: [denoise_ref], slice: v6e-1}
  decoder: {stages: [decoder], slice: v6e-1}
"""
LAYOUTS = {"wan2.2-i2v-a14b": TWO_EXPERTS, "minimax-h3": TEXT_ENCODER_APART}
LINES = {
    "wan2.1-t2v-1.3b": [
        {"prompt": "a cat", "video": "VIDEO", "strength": 0.5, **SIZE},
        {"prompt": "a cat", "video": "VIDEO", "strength": 1.0, "solver": "euler", **SIZE},
        {"prompt": "a dog", "negative_prompt": "rain", "guidance_scale": 3, "shift": 4, "fps": 12, "seed": 3, **SIZE},
        {"prompt": "a dog", "generate_audio": False, "truncate_prompt": False, **SIZE},
        {"prompt": "a dog", "sigmas": [1.0, 0.7, 0.4], "loras": ["LORA"], **SIZE | {"steps": 3}},
    ],
    "wan2.2-i2v-a14b": [
        {"prompt": "a cat", "image": "PHOTO", "guidance_scale": 3, "guidance_scale_2": 1, "switch_step": 1, **SIZE},
        {"prompt": "a cat", "image": "PHOTO", "cache": "magcache", "preset": "quick", **SIZE | {"steps": 12}},
        {"prompt": "a cat", "image": "PHOTO", "last_image": "PHOTO", **SIZE},
    ],
    # All lines have the same prompt, which the text encoder reads together with each line's own images.
    "minimax-h3": [
        READ,
        {"image": "PHOTO", **READ},
        {"image": "OTHER", **READ},
        {"image": "PHOTO", "last_image": "OTHER", **READ},
        {"references": [{"kind": "image", "source": "PHOTO"}], "reference_size": "match", **READ},
        {"references": [{"kind": "image", "source": "PHOTO"}, {"kind": "continued", "source": "CLIP"}], **READ},
        {"references": [{"kind": "continued", "source": "CLIP"}], **READ},
    ],
}
RATIOS = [[0.97, 0.97]] * 3 + [[0.97, 1.5]] + [[0.97, 0.97]] * 8  # With these, some steps are skipped, others aren't.


@pytest.fixture(scope="module")
def files(checkpoint, tmp_path_factory):
    """The files that lines name, by name."""
    folder = tmp_path_factory.mktemp("inputs")
    pixels = np.random.default_rng(0).random((5, 32, 48, 3), np.float32)
    kind = diffusers.WanTransformer3DModel
    transformer = kind.from_pretrained(checkpoint("wan2.1-t2v-1.3b"), subfolder="transformer")
    names = adapter_files.blocks(transformer, adapter_files.WAN)
    tensors = adapter_files.name_tensors(adapter_files.factors(transformer, names), names, "diffusion_model.")
    Image.open(PHOTO).rotate(180).save(folder / "other.png")
    return {
        "OTHER": str(folder / "other.png"),
        "CLIP": str(write_video(folder / "clip.mp4", 30, height=32, width=64)),
        "VIDEO": str(Video(pixels, 8.0).save(folder / "video.mp4")),
        "LORA": adapter_files.save(tensors, folder / "lora.safetensors"),
        "PHOTO": str(PHOTO),
    }


def test_all_fields_are_among_the_lines():
    fields = {field.name for field in dataclasses.fields(GenerationRequest)}
    refused = {"max_seconds"}  # By models that don't choose the length of a video.
    assert set().union(refused, *(line for lines in LINES.values() for line in lines)) == fields


def test_programs_are_named_by_how_many_images_a_text_encoder_reads():
    """Otherwise a leader would expect a program for another number of images to need the same memory and time."""

    def names(model, size, stages):
        spec, request = published_spec(model), GenerationRequest(prompt="a cat", **size)
        counts = ((False, False), (True, False), (True, True))
        kinds = [counts[1:], counts]["t2v" in spec.tasks]
        plans = [spec.plan(request, image=image, last=last) for image, last in kinds]
        return [len({plan.shapes[stage] for plan in plans}) for stage in stages]

    assert names("minimax-h3", {}, ("encoder", "denoise", "decoder")) == [3, 3, 1]
    assert names("wan2.2-i2v-a14b", SIZE, ("encoder", "denoise_high", "decoder")) == [1, 1, 1]


@pytest.fixture(scope="module")
def open_model(checkpoint, pipeline, tmp_path_factory):
    """A function that returns the folder of a model and its pipeline in one process.

    The model with two experts has sampling settings of its own, and the one with sound has a quarter of the samples.
    """

    def model(kind):
        if kind == "minimax-h3":
            folder = make_checkpoint(tmp_path_factory.mktemp("sound") / "model", kind, audio_vae=FEW_SAMPLES)
            return folder, load_pipeline(folder, "float32", (1, 1, 1))
        if kind != "wan2.2-i2v-a14b":
            return checkpoint(kind), pipeline(kind)
        folder = shutil.copytree(checkpoint(kind), tmp_path_factory.mktemp("own") / "model")
        spec = open_spec(folder)
        request = GenerationRequest(height=32, width=48, frames=5, steps=12, shift=5.0)
        first_low = spec.experts(spec.plan(request, image=True).request)[0].stop
        curve = {"ratios": RATIOS, "first_low": first_low, "shift": 5.0, "boundary": 0.9}
        quick = {"about": "for tests", "source": "none", "settings": {"shift": 5.0, "guidance_scale": 2.0}}
        (folder / "wan_tpu.json").write_text(json.dumps({"magcache": [curve], "presets": {"quick": quick}}))
        return folder, load_pipeline(folder, "float32", (1, 1, 1))

    return model


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind",
    [
        "wan2.1-t2v-1.3b",
        pytest.param("wan2.2-i2v-a14b", marks=pytest.mark.thorough),
        pytest.param("minimax-h3", marks=pytest.mark.thorough),
    ],
)
def test_lines_become_the_videos_of_one_process(kind, open_model, files, tmp_path, monkeypatch):
    folder, pipe = open_model(kind)
    model = pipe.runtime.model.spec
    paths = {**files, "manifest": tmp_path / "requests.jsonl"}
    lines = [json.dumps(line) for line in LINES[kind]]
    for name, path in files.items():
        lines = [line.replace(f'"{name}"', json.dumps(path)) for line in lines]
    paths["manifest"].write_text("\n".join(lines))
    manifest = read_manifest(paths["manifest"], model)
    assert not manifest.bad, manifest.bad
    alone = OneProcessEngine(pipe)
    expected = {
        entry.id: asyncio.run(alone.generate(entry.load(), id=entry.id, on_event=lambda span: None))
        for entry in manifest.entries
    }
    alone.close()
    assert len({video.mp4 for video in expected.values()}) == len(expected)
    has_sound = model.audio_rate is not None
    assert all(("Audio: aac" in streams(video.mp4)) == has_sound for video in expected.values())
    layout = Layout.parse(LAYOUTS.get(kind, ONE_EXPERT), "here")
    settings = PipelineSettings(str(folder), "snapshots", dtype="float32", snapshot_every=2)
    monkeypatch.setattr("actors.slices.stage_host.open_runtime", lambda *args, **options: pipe.runtime)

    async def live(world):
        spec = PipelineSpec(layout, settings, model, lasting=True)
        run = Run(world, requests=0, faults=False, slices=1, drivers=1, spec=spec)
        for pool in run.pools.values():
            pool.make_host = lambda stages: StageHost(settings.checkpoint, stages, (1, 1, 1), "float32", report=repr)
        engine = run.drivers[0].engine

        def lose_hosts_once(span):
            if span.step is not None and span.request == manifest.entries[-1].id:
                steps.append(span.step)
                if steps == [1, 2, 3]:
                    pool = run.pools[span.pool]
                    pool.lose(pool.replicas[0], "its hosts were killed")

        making = [engine.generate(entry.load(), id=entry.id, on_event=lose_hosts_once) for entry in manifest.entries]
        return {entry.id: video for entry, video in zip(manifest.entries, await asyncio.gather(*making), strict=True)}

    steps = []
    with virtual_time() as loop:
        videos = loop.run_until_complete(live(World(loop, 0)))
    for id, video in expected.items():
        assert videos[id].mp4 == video.mp4
        assert sorted(videos[id].warnings) == sorted(video.warnings)
    # After the resume from a snapshot, which has neither prompt nor images, both were encoded again.
    assert steps[:4] == [1, 2, 3, 3]
