"""Linear layers in 8 bits: weights as torch rounds them, videos near diffusers' with each layer rounded by torch."""

import dataclasses
import re

import diffusers
import numpy as np
import pytest
import torch

from actors.cli import main
from scripts.demo_model.variants import EIGHT_BITS, round_rows
from tests.conftest import PHOTO, record_steps
from tests.wan_tpu import adapter_files as files
from tests.wan_tpu.test_parity import run_diffusers
from wan_tpu import GenerationRequest, load_pipeline
from wan_tpu.adapters.merging import AdapterCache
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.commands.parser import PRECISIONS
from wan_tpu.errors import CheckpointError, InvalidInput
from wan_tpu.families.model import open_model
from wan_tpu.families.wan.transformer import MATRICES
from wan_tpu.requested_adapter import parse_adapter
from wan_tpu.runtime import components, converted
from wan_tpu.runtime.components import load_component, round_to_8_bits
from wan_tpu.runtime.mesh import make_mesh

KIND = "wan2.2-t2v-a14b"
REQUEST = GenerationRequest(
    prompt="A cat looks into the camera",
    negative_prompt="ugly",
    height=64,
    width=96,
    frames=9,
    steps=4,
    guidance_scale=3.5,
    guidance_scale_2=2.5,
    shift=5.0,
    solver="unipc",
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((1, 1, 1), heads=4)


class RoundedLinear(torch.nn.Module):
    """A linear layer that rounds its weight and what it is given."""

    def __init__(self, linear, precision):
        super().__init__()
        self.weight, self.bias, self.precision = round_rows(linear.weight, precision), linear.bias, precision

    def forward(self, x):
        return torch.nn.functional.linear(round_rows(x, self.precision), self.weight, self.bias)


def by_diffusers(folder, precision, monkeypatch):
    """Latents after each step, by diffusers' pipeline, with linear layers rounded unless precision is None."""
    read = diffusers.WanTransformer3DModel.from_pretrained.__func__

    def with_rounded_layers(cls, *args, **more):
        module = read(cls, *args, **more)
        for name, linear in list(module.named_modules()):
            if precision and re.fullmatch(MATRICES, f"{name}.weight"):
                owner, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(owner), leaf, RoundedLinear(linear, precision))
        return module

    with monkeypatch.context() as patch:
        patch.setattr(diffusers.WanTransformer3DModel, "from_pretrained", classmethod(with_rounded_layers))
        noise = np.random.default_rng(0).standard_normal((1, 16, 3, 8, 12)).astype(np.float32)
        return noise, run_diffusers(folder, REQUEST, "t2v", noise)[1]


def apart(a, b):
    return np.sqrt(np.square(a - b).mean()) / b.std()


@pytest.fixture(scope="module")
def exact(checkpoint):
    with pytest.MonkeyPatch.context() as patch:
        return by_diffusers(checkpoint(KIND), None, patch)[1]


INT8_OFTEN = [
    precision if precision == "int8" else pytest.param(precision, marks=pytest.mark.thorough)
    for precision in EIGHT_BITS
]


@pytest.mark.parametrize("precision", INT8_OFTEN)
def test_latents_are_those_of_diffusers_with_rounded_layers(precision, exact, checkpoint, monkeypatch):
    """With float32 in the place of bfloat16: what differs is what lies amid two numbers of 8 bits."""
    noise, expected = by_diffusers(checkpoint(KIND), precision, monkeypatch)
    monkeypatch.setitem(components.DTYPES, precision, components.DTYPES["float32"])
    latents = [
        event.latents for event in record_steps(load_pipeline(checkpoint(KIND), precision, (1, 1, 1)), REQUEST, noise)
    ]
    assert len(latents) == len(expected)
    for step, (ours, theirs, dense) in enumerate(zip(latents, expected, exact, strict=True)):
        assert apart(ours, theirs) <= (0.5 if step else 0.1) * apart(theirs, dense)


@pytest.mark.parametrize("precision", EIGHT_BITS)
def test_weights_are_rounded_by_output_and_all_others_kept(precision, checkpoint, mesh):
    source = Checkpoint(checkpoint(KIND))
    for name, component in open_model(source).components.items():
        params = load_component(source, component, precision, mesh).params
        plain = load_component(source, component, "bfloat16", mesh).params
        exact = load_component(source, component, "float32", mesh).params
        assert {weight for weight in params if weight not in plain} == {
            f"{weight}_scale" for weight in matrices(name, plain)
        }
        for weight, array in plain.items():
            if weight not in matrices(name, plain):
                assert np.array_equal(np.asarray(params[weight]), np.asarray(array)), weight
                continue
            assert params[weight].dtype == components.MATRICES[precision]
            ours = np.asarray(params[weight], np.float32) * np.asarray(params[f"{weight}_scale"])[..., None]
            theirs = round_rows(torch.from_numpy(np.array(exact[weight])), precision).numpy()
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)


def matrices(component, params):
    if not component.startswith("denoise"):
        return set()
    parts = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
    return {name for name in params if name.endswith(".weight") and any(f".{part}.weight" in name for part in parts)}


def test_what_is_not_finite_stays_so():
    value = np.array([[1, np.nan], [np.inf, 1], [0, 0], [2, -4]], np.float32)
    for kind in components.MATRICES.values():
        values, scales = round_to_8_bits(value, kind)
        with np.errstate(invalid="ignore"):
            wide = values.astype(np.float32) * scales[:, None]
        assert not np.isfinite(wide[:2]).all(axis=1).any()
        assert np.array_equal(wide[2], [0, 0]) and np.allclose(wide[3], [2, -4], rtol=0.07)


@pytest.mark.parametrize("precision", INT8_OFTEN)
def test_converted_once_it_is_read_as_it_is(precision, checkpoint, tmp_path, mesh):
    """For the precision with 8-bit logits as well, which are no matter to weights."""
    source, written = checkpoint(KIND), str(tmp_path / precision)
    assert main(["weights", "convert", str(source), written, "--precision", f"{precision}-attention"]) == 0
    for suffix in ("-attention", "-attention-both"):
        load_pipeline(written, f"{precision}{suffix}", (1, 1, 1)).check_components()
    for component in open_model(Checkpoint(written)).components.values():
        ours = load_component(Checkpoint(written), component, precision, mesh).params
        expected = load_component(Checkpoint(source), component, precision, mesh).params
        assert ours.keys() == expected.keys()
        for name, array in ours.items():
            assert array.dtype == expected[name].dtype
            assert np.array_equal(np.asarray(array).view(np.uint8), np.asarray(expected[name]).view(np.uint8)), name
    main(["weights", "convert", str(source), str(tmp_path / "plain")])
    for folder in ("text_encoder", "vae"):  # which have no 8 bits
        content, plain = ((tmp_path / place / folder / converted.FILE).read_bytes() for place in (precision, "plain"))
        assert content == plain
    with pytest.raises(CheckpointError, match=f"--precision {precision}"):
        load_pipeline(written, "bfloat16", (1, 1, 1)).check_components()


@pytest.mark.thorough
def test_adapters_are_added_to_what_8_bits_hold(checkpoint, pipeline, tmp_path):
    transformer = diffusers.WanTransformer3DModel.from_pretrained(checkpoint(KIND), subfolder="transformer")
    names = files.blocks(transformer, files.WAN)
    factors = files.factors(transformer, names)
    tensors = files.name_tensors(factors, names, "diffusion_model.", alpha=4)
    adapter = files.save(tensors, tmp_path / "adapter.safetensors")
    difference = torch.randn(transformer.blocks[1].ffn.net[2].weight.shape, generator=torch.Generator().manual_seed(0))
    other = files.save({"diffusion_model.blocks.1.ffn.2.diff": difference / 10}, tmp_path / "other.safetensors")
    exact, loras = AdapterCache(), (parse_adapter(f"{adapter}:0.5"),)
    for precision in EIGHT_BITS:
        runtime = pipeline(KIND, precision).runtime
        base = runtime.component("denoise_high").params
        changed = runtime.component("denoise_high", loras).params
        factors = exact.read(runtime.model.components["denoise_high"], runtime.component("denoise_high"), loras[0])
        assert set(factors.factors) == matrices("denoise_high", base)
        for name, (up, down, gain) in ((name, dataclasses.astuple(factor)) for name, factor in factors.factors.items()):
            delta = (up.astype(np.float32) * gain[:, None] * 0.5) @ down.astype(np.float32)
            whole = wide(base, name) + delta
            values, scales = (
                np.stack(parts) for parts in zip(*(round_to_8_bits(x, base[name].dtype) for x in whole), strict=True)
            )
            np.testing.assert_allclose(changed[f"{name}_scale"], scales, rtol=1e-5)
            step = np.abs(values.astype(np.float32)) / 8 if precision == "float8" else 1
            assert (np.abs(np.asarray(changed[name], np.float32) - values.astype(np.float32)) <= step).all()
            assert (np.asarray(changed[name]) == values).mean() > 0.99
        untouched = runtime.component("denoise_high", (parse_adapter(f"{adapter}:0"),)).params
        for name in factors.factors:
            assert np.array_equal(np.asarray(untouched[name]).view(np.uint8), np.asarray(base[name]).view(np.uint8))
            np.testing.assert_allclose(untouched[f"{name}_scale"], base[f"{name}_scale"], rtol=1e-6)

        name = "blocks.template.ffn.net.2.weight"
        changed = runtime.component("denoise_high", (parse_adapter(other),)).params
        expected = wide(base, name) + np.stack([np.zeros_like(difference), difference.numpy() / 10])
        step = {"int8": 127 * 2, "float8": 16}[precision]
        np.testing.assert_allclose(wide(changed, name), expected, atol=1.01 * np.abs(expected).max() / step)
        assert np.array_equal(np.asarray(changed[name][0]).view(np.uint8), np.asarray(base[name][0]).view(np.uint8))
        assert {weight for weight in base if changed[weight] is not base[weight]} == {name, f"{name}_scale"}


def wide(params, name):
    return np.asarray(params[name], np.float32) * np.asarray(params[f"{name}_scale"])[..., None]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("cogvideox1.5-5b", "float8-attention"),
        ("hunyuanvideo1.5-480p-t2v", "float8-attention"),
        ("cogvideox1.5-5b", "int8-attention-both"),
        ("wan2.2-t2v-a14b", "float8-attention-both"),
        ("ltx-2.3-distilled", "int8"),
        ("turbowan2.2-i2v-a14b", "int8"),
        ("wan2.1-i2v-14b-480p", "int8"),  # keys of an image, too
    ],
)
def test_every_family_has_8_bits(kind, precision, pipeline):
    """Near bfloat16's latents, but not equal."""
    steps = {"sigmas": (1.0, 0.5)} if "distilled" in kind else {"steps": 2}
    image = PHOTO if "i2v" in kind else None
    request = GenerationRequest(prompt="a cat", image=image, height=64, width=64, frames=9, seed=3, **steps)
    latents, exact = (record_steps(pipeline(kind, each), request)[-1].latents for each in (precision, "bfloat16"))
    assert 0 < apart(latents, exact) < 0.05


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "frames"), [(KIND, 9), ("minimax-h3", 107)])
def test_both_products_in_8_bits_change_the_latents(kind, frames, pipeline):
    """By more than the logits alone: the switch isn't lost on its way, and the first product stays in 8 bits."""
    request = GenerationRequest(prompt="a cat", height=64, width=64, frames=frames, seed=3, steps=2)
    latents = {
        precision: record_steps(pipeline(kind, precision), request)[-1].latents
        for precision in ("int8", "int8-attention", "int8-attention-both")
    }
    logits, both = (apart(latents[name], latents["int8"]) for name in ("int8-attention", "int8-attention-both"))
    assert 0 < logits < 0.05 and 0 < both < 0.05
    assert 0 < apart(latents["int8-attention-both"], latents["int8-attention"]) < 0.05


def test_commands_know_every_precision():
    assert set(PRECISIONS) == set(components.DTYPES)


def test_what_has_no_8_bits_is_refused(checkpoint, tmp_path, capsys):
    ltx = str(checkpoint("ltx-2.3-distilled"))
    assert main(["weights", "convert", ltx, str(tmp_path / "to"), "--precision", "int8-attention"]) == 2
    assert "int8-attention" in capsys.readouterr().err and not (tmp_path / "to").exists()
    with pytest.raises(InvalidInput, match=r"int8-attention.* float32, bfloat16, int8, f"):
        load_pipeline(checkpoint("turbowan2.2-i2v-a14b"), "int8-attention", (1, 1, 1))
    with pytest.raises(InvalidInput, match=r"int8-attention-both.* float32, bfloat16, int8, float8$"):
        load_pipeline(ltx, "int8-attention-both", (1, 1, 1))
    with pytest.raises(InvalidInput, match=r"'int4'.* float32, bfloat16, int8, float8, int8-"):
        load_pipeline(checkpoint(KIND), "int4", (1, 1, 1))
