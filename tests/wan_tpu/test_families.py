"""A family that nothing knows of but its registration: made, planned, run, cut into stages, compiled, offered."""

import json

import imageio.v3 as iio
import numpy as np
import pytest
import transformers

from actors.api.http import models
from actors.api.settings import ServiceSettings
from cluster.layout import Layout
from tests.wan_tpu import toy_family
from wan_tpu import GenerationRequest, InvalidRequest, load_pipeline
from wan_tpu.aot.precompile import precompile
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.cli import run
from wan_tpu.commands.generate import generate
from wan_tpu.commands.staged import decode, denoise, encode
from wan_tpu.errors import CheckpointError
from wan_tpu.families import FAMILIES, list_published, open_spec, published_spec
from wan_tpu.families.model import open_model
from wan_tpu.runtime.mesh import make_mesh
from wan_tpu.tiny import make_checkpoint

REQUEST = {"prompt": "A red ball rolls.", "seed": 3}
COMMAND = ["--dtype", "float32", "--dp", "1", "--sp", "1", "--tp", "1"]


@pytest.fixture(autouse=True)
def registered_family(monkeypatch):
    monkeypatch.setitem(FAMILIES, toy_family.FAMILY.transformer, toy_family.FAMILY)


@pytest.fixture
def folder(tmp_path, registered_family):
    return make_checkpoint(tmp_path / "toy", "toy-large")


def test_it_is_found_by_its_transformer(folder, monkeypatch):
    assert "toy-large" in list_published()
    assert open_spec(folder).name == published_spec("toy-large").name == "toy-large"
    monkeypatch.delitem(FAMILIES, "Colours")
    with pytest.raises(CheckpointError, match=r"ToyPipeline.*Colours"):
        open_spec(folder)


@pytest.mark.parametrize(
    "kind", ["wan2.1-t2v-1.3b", "cogvideox-2b", "hunyuanvideo1.5-480p-t2v", "ltx-2.3", "minimax-h3"]
)
def test_tokenizers_are_read_once_for_all_prompts(kind, checkpoint, monkeypatch):
    model = open_model(Checkpoint(checkpoint(kind)))
    first, _ = model.tokenize('a cat, "meow"')
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", None)
    second, _ = model.tokenize('a dog, "wow"')
    assert set(first) == set(second) == set(model.tokenizers)
    assert all((first[name][0] != second[name][0]).any() for name in first)


def test_its_videos_are_torchs(folder):
    pipe = load_pipeline(folder, dtype="float32", mesh=(1, 1, 1))
    video = pipe.generate(GenerationRequest(**REQUEST))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    ids = tokenizer([REQUEST["prompt"]], padding="max_length", max_length=16, truncation=True, return_tensors="pt")
    encoder = transformers.T5EncoderModel.from_pretrained(folder / "text_encoder")
    text = encoder(ids["input_ids"]).last_hidden_state.detach().numpy()
    request = pipe.plan(GenerationRequest(**REQUEST)).request
    noise = pipe.runtime.model.initial_noise(request)
    _, colours = toy_family.colours(folder, text, noise, request.steps, request.shift)
    expected = np.clip(colours, -1, 1).repeat(8, axis=1).repeat(8, axis=2) / 2 + 0.5
    expected = np.concatenate([expected[:1], expected[1:].repeat(4, axis=0)])
    assert np.abs(video.pixels - expected).max() < 1e-4


def test_commands_stages_and_stored_programs(folder, tmp_path):
    argv = ["--model_id", str(folder), "--prompt", REQUEST["prompt"], "--seed", "3", *COMMAND]
    whole = tmp_path / "whole.mp4"
    assert run(generate, [*argv, "--output", str(whole)]) == 0
    assert iio.imread(whole, plugin="FFMPEG").shape == (9, 64, 96, 3)
    assert [stage["stage"] for stage in json.loads(whole.with_suffix(".json").read_text())["stages"]] == [
        "encoder", "rough", "fine", "decoder",
    ]  # fmt: skip
    stages = tmp_path / "stages"
    assert run(encode, [*argv, "--output_dir", str(stages)]) == 0
    assert run(denoise, ["--input_dir", str(stages)]) == 0
    assert run(decode, ["--input_dir", str(stages)]) == 0
    assert (stages / "video.mp4").read_bytes() == whole.read_bytes()

    model = open_model(Checkpoint(folder))
    request = GenerationRequest(**REQUEST).resolve(model.spec.defaults)
    done = precompile(model, request, make_mesh((1, 1, 1), heads=1), "float32", tmp_path / "programs")
    assert len(list(done)) == 5
    loaded = tmp_path / "loaded.mp4"
    assert run(generate, [*argv, "--executables", str(tmp_path / "programs"), "--output", str(loaded)]) == 0
    record = json.loads(loaded.with_suffix(".json").read_text())
    assert [stage["compile_s"] for stage in record["stages"]] == [0] * 4
    assert loaded.read_bytes() == whole.read_bytes()


def test_layouts_and_the_service_know_its_stages(folder):
    spec = open_spec(folder)
    layout = Layout.parse("pools: {all: {stages: [encoder, rough, fine, decoder], slice: v6e-1}}", "mine")
    layout.check_stages(spec.stages)
    description = models.describe_model(ServiceSettings(database="", storage="", model="mine"), spec, 0)
    assert (description.stages, description.defaults["size"]) == (["encoder", "rough", "fine", "decoder"], "96x64")
    with pytest.raises(InvalidRequest, match="image"):
        spec.plan(GenerationRequest(**REQUEST), image=True)
