"""FastVideo's FastH3: what its checkpoints and adapters say, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.wan_tpu import adapter_files as files
from wan_tpu import GenerationRequest, InvalidRequest, load_pipeline
from wan_tpu.adapters.adapter import Targets
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families import open_spec, published_spec
from wan_tpu.families.minimax_h3 import components, fasth3, sampling
from wan_tpu.families.minimax_h3.config import read_config
from wan_tpu.families.minimax_h3.published import PUBLISHED
from wan_tpu.families.minimax_h3.small import make_checkpoint
from wan_tpu.plan import AUDIO, VIDEO
from wan_tpu.runtime.components import abstract_component
from wan_tpu.runtime.mesh import make_mesh

REQUEST = GenerationRequest(prompt="A cat plays the piano.", height=64, width=96)


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint(tmp_path / "model", fasth3=fasth3.V2)


def change_contract(folder, **changes):
    file = folder / fasth3.CONTRACT
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_steps_shifts_and_sparsity_are_those_of_the_file(folder):
    spec = open_spec(folder)
    request = spec.plan(REQUEST).request
    assert (spec.config.fasth3, request.steps, request.shift, spec.sparsity(request)) == (fasth3.V2, 8, 10.0, 0.8)
    levels = np.array(fasth3.V2.levels)
    for part, shift in ((VIDEO, 10.0), (AUDIO, 3.0)):
        expected = shift * levels / (1 + (shift - 1) * levels)
        np.testing.assert_allclose(spec.schedules(request)[part].sigmas[:8], -expected, rtol=1e-6)
    # Another number of steps has the usual schedule.
    assert spec.schedules(dataclasses.replace(request, steps=4))[VIDEO].sigmas[0] == pytest.approx(-1)


def test_first_version_is_recognised_by_its_list_of_tensors(folder):
    (folder / fasth3.CONTRACT).unlink()
    assert read_config(Checkpoint(folder)).fasth3 is None
    names = components.build_transformer(
        dataclasses.replace(PUBLISHED["fasth3-v1"], transformer=read_config(Checkpoint(folder)).transformer)
    ).state_dict()
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, file.name)}
    file.with_name(f"{file.name}.index.json").write_text(json.dumps(index))
    assert read_config(Checkpoint(folder)).fasth3 == fasth3.V1


@pytest.mark.parametrize(
    "changes", [{"vsa_tile_size": 256}, {"schema_version": "2"}, {"vsa_sparsity": 1.5}, {"dmd_denoising_steps": []}]
)
def test_file_that_says_something_else_is_refused(folder, changes):
    change_contract(folder, **changes)
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        open_spec(folder)


def test_images_are_refused_unless_a_preset_asks_for_them(folder):
    image = Image.new("RGB", (96, 64))
    for spec, text, images in (
        (open_spec(folder), None, "images"),
        (published_spec("minimax-h3"), "fasth3-vsa", "fasth3-vsa-images"),
        (published_spec("fasth3-v1"), None, "images"),
    ):
        size = {} if text else {"height": 64, "width": 96}
        request = GenerationRequest(prompt="A cat plays the piano.", last_image=image, **size)
        with pytest.raises(InvalidRequest) as refused:
            spec.plan(dataclasses.replace(request, preset=text))
        assert refused.value.field == "last_image"
        plan = spec.plan(dataclasses.replace(request, preset=images))
        assert plan.images == 1 and spec.sparsity(plan.request) is not None
        # No programs for images are compiled where these are refused.
        without = spec.plan(dataclasses.replace(request, last_image=None, preset=text)).request
        assert (spec.images_of(without), spec.images_of(plan.request)) == ((0,), (1, 0, 2))


def test_published_ones_have_their_names_and_steps():
    for name, steps, shift in (("fasth3-v1", 4, 12.0), ("fasth3-v2", 8, 10.0)):
        spec = published_spec(name)
        request = spec.plan(GenerationRequest(prompt="x")).request
        assert (spec.name, request.steps, request.shift) == (name, steps, shift)
    preset = published_spec("minimax-h3").plan(GenerationRequest(prompt="x", preset="fasth3-vsa")).request
    v1 = published_spec("fasth3-v1")
    assert v1.schedules(v1.plan(GenerationRequest(prompt="x")).request)[VIDEO].sigmas == pytest.approx(
        published_spec("minimax-h3").schedules(preset)[VIDEO].sigmas
    )


def test_an_adapter_may_set_the_gates_of_all_layers(tmp_path):
    """Each is a matrix as large as that of queries; a header that counts other tensors is refused."""
    component = components.transformer(read_config(Checkpoint(make_checkpoint(tmp_path / "base"))))
    loaded = abstract_component(component, "float32", make_mesh((1, 1, 1), heads=8))
    targets, draw = Targets(component, loaded), torch.Generator().manual_seed(0)
    gates = [torch.randn(256, 64, generator=draw) for _ in range(3)]

    def save(count, stated=None, names="transformer_blocks.{}.attn.to_gate_compress.set_weight"):
        tensors = {names.format(i): gate for i, gate in enumerate(gates[:count])}
        counts = {"set_weight_tensors": str(count if stated is None else stated)}
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
        return str(files.save(tensors, path, metadata={"format": "fastvideo-lora-v2", **counts}))

    [(name, whole)] = targets.read(save(3)).added.items()
    np.testing.assert_array_equal(whole, torch.stack(gates).numpy())
    assert name in loaded.with_added(component).params and name not in loaded.params
    for path, match in ((save(2), "of 3"), (save(3, stated=50), "50")):
        with pytest.raises(InvalidRequest, match=match):
            targets.read(path)
    with pytest.raises(InvalidRequest, match="to_q"):  # What the model has isn't set.
        targets.read(save(3, names="transformer_blocks.{}.attn.to_q.set_weight"))


def test_gates_and_their_preset_come_together_before_any_work(tmp_path, monkeypatch):
    pipe = load_pipeline(make_checkpoint(tmp_path / "base"), dtype="float32")
    names = [f"transformer_blocks.{layer}.attn.{{}}" for layer in range(3)]
    gates = {name.format("to_gate_compress.set_weight"): torch.ones(256, 64) for name in names}
    metadata = {"format": "fastvideo-lora-v2", "set_weight_tensors": "3"}
    own, other = (str(files.save(gates, tmp_path / f"{i}.safetensors", metadata=metadata)) for i in range(2))
    style = {
        names[0].format(f"to_q.lora_{part}.weight"): torch.ones(shape)
        for part, shape in (("A", (1, 64)), ("B", (256, 1)))
    }
    plain = str(files.save(style, tmp_path / "style.safetensors"))

    def fetch(*loras):
        return pipe.fetch_adapters(pipe.plan(dataclasses.replace(REQUEST, loras=loras)))

    with pytest.raises(InvalidRequest, match="preset"):
        fetch(own)
    monkeypatch.setitem(sampling.SPARSITIES, "", 0.8)  # A small checkpoint has no such preset.
    fetch(own, plain)
    for loras in ([plain], [own, other], [f"{own}:0.5"]):
        with pytest.raises(InvalidRequest) as refused:
            fetch(*loras)
        assert refused.value.field == "loras"
    assert not pipe.runtime.load_s
