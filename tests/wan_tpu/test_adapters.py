"""Adapters: what is made of files in the wild is what diffusers makes of them, or what is computed by hand."""

import asyncio
import contextlib
import json
import os
import random
import re
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch

from actors.api.catalogue import Catalogue
from actors.batch.checking import CheckingPlanner
from actors.batch.manifest import read_manifest
from actors.batch.one_process import OneProcessEngine
from actors.cli import main
from actors.commands import serve_config
from tests.conftest import denoised
from tests.wan_tpu import adapter_files as files
from tests.wan_tpu.test_parity import PIXEL_TOLERANCE
from wan_tpu import GenerationRequest, load_pipeline
from wan_tpu.adapters import merging
from wan_tpu.adapters.adapter import Targets
from wan_tpu.adapters.files import find, read
from wan_tpu.adapters.merging import KEPT, Adapters
from wan_tpu.adapters.room import DeviceRoom
from wan_tpu.errors import InvalidRequest, Unavailable
from wan_tpu.lora import Lora, lora_of
from wan_tpu.pipeline import Pipeline
from wan_tpu.runtime.bridge import ScannedBlocks

RELATIVE = 1e-5  # to the largest value: float32 rounding of a merged weight, and what six steps make of it
KIND = "wan2.2-t2v-a14b"


@pytest.fixture(scope="module")
def transformer(checkpoint):
    return diffusers.WanTransformer3DModel.from_pretrained(checkpoint(KIND), subfolder="transformer")


def merged(pipe, stage, *loras):
    """Return an expert's weights with adapters applied, under diffusers' names and in its order of rows."""
    runtime = pipe.runtime
    loaded = runtime.component(stage, tuple(map(lora_of, loras)))
    component = runtime.model.components[stage]
    depths = {path: m.depth for path, m in loaded.module.named_modules() if isinstance(m, ScannedBlocks)}
    found = {}
    for name in dict(loaded.module.named_parameters()):
        value = np.asarray(loaded.params[name])
        path = next((path for path in depths if name.startswith(f"{path}.template.")), None)
        rest = name if path is None else name.removeprefix(f"{path}.template.")
        plain = name if path is None else f"{path}.*.{rest}"
        change = next((change for pattern, change in component.changes if re.fullmatch(pattern, plain)), None)
        for i in range(1 if path is None else depths[path]):
            layer = value if path is None else value[i]
            if change is not None:  # turned back: where did each row come from?
                order = change(np.arange(len(layer)))
                layer = layer[np.argsort(order)]
            found[name if path is None else f"{path}.{i}.{rest}"] = torch.tensor(layer)
    return found


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert (got[name] - value).abs().max() <= RELATIVE * value.abs().max(), name


def fused(folder, path, stage, scale=1.0, **more):
    """Return what diffusers makes of an expert with an adapter."""
    pipe = diffusers.WanPipeline.from_pretrained(folder)
    second = stage == "denoise_low"
    pipe.load_lora_weights(path, load_into_transformer_2=second, **more)
    name = "transformer_2" if second else "transformer"
    pipe.fuse_lora(components=[name], lora_scale=scale)
    pipe.unload_lora_weights()
    return getattr(pipe, name).state_dict()


# Of what diffusers reads correctly: prefix, parts, alpha, and what is underscored.
FORMATS = {
    "lightx2v": ("diffusion_model.", "lora_down", "lora_up", 8, False),
    "diffusion-pipe": ("diffusion_model.", "lora_A", "lora_B", None, False),
    "musubi": ("lora_unet_", "lora_down", "lora_up", 2, True),
}
# Of what other trainers write and diffusers doesn't read: as above, and whether modules go by diffusers' names.
OTHER_FORMATS = {
    "videox-fun": ("lora_unet__", "lora_down", "lora_up", 2, True, False),
    "diffsynth": ("pipe.dit.", "lora_A.default", "lora_B.default", None, False, False),
    "onetrainer": ("lora_transformer_", "lora_down", "lora_up", 2, True, True),
    "onetrainer, with dots": ("lora_transformer.", "lora_down", "lora_up", 2, False, True),
    "lycoris": ("lycoris_", "lora_down", "lora_up", 2, True, True),
    "compiled": ("transformer._orig_mod.", "lora_A", "lora_B", None, False, True),
    "distributed": ("base_model.model.module.", "lora_A.default", "lora_B.default", None, False, True),
}


@pytest.mark.parametrize(("form", "stage"), [*((form, "denoise_high") for form in FORMATS), ("musubi", "denoise_low")])
def test_files_in_wans_names_are_applied_as_diffusers_does(form, stage, checkpoint, pipeline, transformer, tmp_path):
    prefix, down, up, alpha, underscores = FORMATS[form]
    names = files.blocks(transformer, files.WAN)
    made = files.factors(transformer, names)
    tensors = files.named(made, names, prefix, down, up, alpha=alpha, underscores=underscores)
    path = files.save(tensors, tmp_path / "lora.safetensors")
    expert = stage.removeprefix("denoise_")

    got = merged(pipeline(KIND), stage, f"{path}:0.7@{expert}")

    expected = fused(checkpoint(KIND), path, stage, 0.7)
    assert_same(got, expected)
    base = merged(pipeline(KIND), stage)
    assert (got["blocks.1.attn1.to_q.weight"] - base["blocks.1.attn1.to_q.weight"]).abs().max() > 0.01
    other = "low" if expert == "high" else "high"
    assert pipeline(KIND).resolve(request(loras=[f"{path}@{other}"])).loras_for(stage) == ()


@pytest.mark.parametrize("form", OTHER_FORMATS)
def test_files_of_other_trainers_are_applied(form, pipeline, transformer, tmp_path):
    prefix, down, up, alpha, underscores, own = OTHER_FORMATS[form]
    names = files.blocks(transformer, files.WAN)
    made = files.factors(transformer, names)
    written = {name: name if own else original for name, original in names.items()}
    tensors = files.named(made, written, prefix, down, up, alpha=alpha, underscores=underscores)
    path = files.save(tensors, tmp_path / "x.safetensors")
    expected = files.by_hand(transformer.state_dict(), made, 1.0 if alpha is None else alpha / 4)
    assert_same(merged(pipeline(KIND), "denoise_high", path), expected)


def test_factors_without_weight_in_their_names_and_norms_of_lycoris_are_applied(pipeline, transformer, tmp_path):
    state, norm = transformer.state_dict(), "blocks.0.norm2"
    made = files.factors(transformer, ["blocks.0.attn1.to_q"])
    tensors = files.named(made, {"blocks.0.attn1.to_q": "blocks.0.attn1.to_q"}, "")
    tensors = {name.removesuffix(".weight"): value for name, value in tensors.items()}
    tensors |= {f"{norm}.w_norm": torch.ones(48), f"{norm}.b_norm": torch.full((48,), 2.0)}
    expected = files.by_hand(state, made, 1.0)
    expected |= {f"{norm}.weight": state[f"{norm}.weight"] + 1, f"{norm}.bias": state[f"{norm}.bias"] + 2}
    path = files.save(tensors, tmp_path / "x.safetensors")
    assert_same(merged(pipeline(KIND), "denoise_high", path), expected)


def test_what_diffusers_saves_is_applied_as_it_does(checkpoint, pipeline, tmp_path):
    """Ranks and alphas differ from module to module; they stand in the header."""
    import peft

    pipe = diffusers.WanPipeline.from_pretrained(checkpoint(KIND))
    config = peft.LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=["to_q", "to_k", "to_v", "to_out.0", "net.2", "proj_out"],
        rank_pattern={"attn2.to_k": 2},
        alpha_pattern={"attn1.to_v": 5},
        init_lora_weights=False,
    )
    pipe.transformer.add_adapter(config)
    layers = peft.get_peft_model_state_dict(pipe.transformer)
    assert {len(v) for k, v in layers.items() if "lora_A" in k} == {2, 4}
    diffusers.WanPipeline.save_lora_weights(
        tmp_path, layers, transformer_lora_adapter_metadata=config.to_dict() | {"target_modules": []}
    )
    pipe.fuse_lora(components=["transformer"])
    pipe.unload_lora_weights()
    assert_same(merged(pipeline(KIND), "denoise_high", str(tmp_path)), pipe.transformer.state_dict())


def test_peft_adapter_folder(pipeline, transformer, tmp_path):
    """peft's own file has alpha beside it alone."""
    names = files.blocks(transformer, {"attn1.to_q": "attn1.to_q"})
    made = files.factors(transformer, names)
    tensors = files.named(made, names, "base_model.model.", "lora_A", "lora_B")
    files.save(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 6, "use_rslora": True}))
    expected = files.by_hand(transformer.state_dict(), made, 6 / 2)
    assert_same(merged(pipeline(KIND), "denoise_high", str(tmp_path)), expected)


def test_what_diffusers_drops_is_applied(pipeline, transformer, tmp_path):
    """A file like Lightning's: diffusers forgets differences of norms, modulations, patch embedding and output."""
    state = transformer.state_dict()
    names = files.blocks(transformer, files.WAN) | files.WAN_OUTER
    made = files.factors(transformer, names)
    tensors = files.named(made, names, "diffusion_model.", alpha=4)
    given = {
        "blocks.0.norm2.weight": "blocks.0.norm3.diff",
        "blocks.0.norm2.bias": "blocks.0.norm3.diff_b",
        "blocks.1.attn1.norm_q.weight": "blocks.1.self_attn.norm_q.diff",
        "blocks.1.attn2.norm_k.weight": "blocks.1.cross_attn.norm_k.diff",
        "blocks.1.attn1.to_k.bias": "blocks.1.self_attn.k.diff_b",
        "blocks.1.ffn.net.0.proj.bias": "blocks.1.ffn.0.diff_b",
        "blocks.1.scale_shift_table": "blocks.1.diff_m",
        "scale_shift_table": "head.diff_m",
        "patch_embedding.weight": "patch_embedding.diff",
        "patch_embedding.bias": "patch_embedding.diff_b",
        "proj_out.bias": "head.head.diff_b",
    }
    generator = torch.Generator().manual_seed(3)
    expected = files.by_hand(state, made, 1.0)
    for own, name in given.items():
        tensors[f"diffusion_model.{name}"] = torch.randn(state[own].shape, generator=generator)
    path = files.save(tensors, tmp_path / "lightning.safetensors")
    twice = files.by_hand(state, made, 0.5)
    for own, name in given.items():
        expected[own] = expected[own] + tensors[f"diffusion_model.{name}"]
        twice[own] = twice[own] + 0.5 * tensors[f"diffusion_model.{name}"]
    assert_same(merged(pipeline(KIND), "denoise_high", path), expected)
    assert_same(merged(pipeline(KIND), "denoise_high", f"{path}:0.5"), twice)


def test_bias_of_peft_follows_alpha(pipeline, transformer, tmp_path):
    made = files.factors(transformer, ["blocks.0.attn1.to_q"])
    tensors = files.named(made, {"blocks.0.attn1.to_q": "blocks.0.attn1.to_q"}, "transformer.", "lora_A", "lora_B")
    bias = torch.arange(48.0)
    tensors |= {"transformer.blocks.0.attn1.to_q.lora_B.bias": bias}
    header = {"lora_adapter_metadata": json.dumps({"transformer.r": 4, "transformer.lora_alpha": 2})}
    path = files.save(tensors, tmp_path / "x.safetensors", header)
    expected = files.by_hand(transformer.state_dict(), made, 0.5)
    expected["blocks.0.attn1.to_q.bias"] = expected["blocks.0.attn1.to_q.bias"] + 0.5 * bias
    assert_same(merged(pipeline(KIND), "denoise_high", path), expected)


def test_several_adapters_add_up(pipeline, transformer, tmp_path):
    """Of different ranks, over different layers, one of them partial; the order doesn't matter."""
    state = transformer.state_dict()
    first = files.factors(transformer, ["blocks.0.attn1.to_q", "blocks.1.ffn.net.2"], rank=4)
    second = files.factors(transformer, ["blocks.1.attn1.to_q"], rank=24, seed=1)
    names = {name: name for name in (*first, *second)}
    one = files.save(files.named(first, names, ""), tmp_path / "one.safetensors")
    two = files.save(files.named(second, names, "", alpha=12), tmp_path / "two.safetensors")
    expected = files.by_hand(files.by_hand(state, first, 2.0), second, -0.5 * 12 / 24)
    assert_same(merged(pipeline(KIND), "denoise_high", f"{one}:2", f"{two}:-0.5"), expected)


def request(**more):
    settings = {"height": 64, "width": 96, "frames": 9, "steps": 4, "guidance_scale": 1.0, "shift": 5.0}
    return GenerationRequest(prompt="a cat", **settings | more)


def test_a_video_is_that_of_diffusers_with_the_same_pair(checkpoint, pipeline, transformer, tmp_path):
    names = files.blocks(transformer, files.WAN)
    paths = {}
    for seed, expert in enumerate(("high", "low")):
        tensors = files.named(files.factors(transformer, names, seed=seed), names, "diffusion_model.", alpha=4)
        paths[expert] = files.save(tensors, tmp_path / f"{expert}.safetensors")
    ours = pipeline(KIND)
    asked = request(loras=[f"{path}@{expert}" for expert, path in paths.items()])
    noise = np.random.default_rng(0).standard_normal(ours.runtime.model.spec.latent_shape(ours.resolve(asked)))
    noise = noise.astype(np.float32)
    pipe = diffusers.WanPipeline.from_pretrained(checkpoint(KIND))
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = diffusers.UniPCMultistepScheduler.from_config(pipe.scheduler.config, flow_shift=5.0)
    pipe.load_lora_weights(paths["high"], adapter_name="a")
    pipe.load_lora_weights(paths["low"], adapter_name="b", load_into_transformer_2=True)
    pipe.fuse_lora(components=["transformer", "transformer_2"])
    expected = []

    def keep(pipe, i, t, values):
        expected.append(values["latents"].numpy().copy())
        return values

    frames = pipe(
        prompt="a cat", height=64, width=96, num_frames=9, num_inference_steps=4, guidance_scale=1.0,
        latents=torch.from_numpy(noise), callback_on_step_end=keep, output_type="np",
    ).frames[0]  # fmt: skip
    before = denoised(ours, request(), noise)[-1].latents

    events = []
    video = ours.generate(asked, noise=noise, on_step=lambda event: events.append(event.latents))

    assert len(events) == len(expected) == 4
    for got, wanted in zip(events, expected, strict=True):
        assert np.abs(got - wanted).max() <= RELATIVE * np.abs(wanted).max()
    assert np.abs(video.pixels - frames).max() <= PIXEL_TOLERANCE
    assert np.abs(events[-1] - before).max() > 0.01
    assert np.array_equal(denoised(ours, request(), noise)[-1].latents, before)  # the base again, to the bit


# ---- other models


def test_image_modules_of_wan_2_1_and_their_absence_in_others(checkpoint, pipeline, tmp_path, caplog):
    """LightX2V's adapter of Wan 2.2's low-noise expert has modules that Wan 2.1 I2V alone has."""
    kind = "wan2.1-i2v-14b-720p"
    transformer = diffusers.WanTransformer3DModel.from_pretrained(checkpoint(kind), subfolder="transformer")
    names = files.blocks(transformer, files.WAN | files.WAN_IMAGE)
    outer = {
        "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
        "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    }
    made = files.factors(transformer, names | outer)
    tensors = files.named(made, names | outer, "diffusion_model.", alpha=4)
    norm = "blocks.0.attn2.norm_added_k.weight"
    tensors["diffusion_model.blocks.0.cross_attn.norm_k_img.diff"] = torch.ones(transformer.state_dict()[norm].shape)
    path = files.save(tensors, tmp_path / "i2v.safetensors")
    expected = files.by_hand(transformer.state_dict(), made, 1.0)
    expected[norm] = expected[norm] + 1
    assert_same(merged(pipeline(kind), "denoise", path), expected)

    other = diffusers.WanTransformer3DModel.from_pretrained(checkpoint(KIND), subfolder="transformer_2")
    alone = {name: value for name, value in made.items() if name in files.blocks(other, files.WAN)}
    with caplog.at_level("WARNING"):
        got = merged(pipeline(KIND), "denoise_low", f"{path}@low")
    assert_same(got, files.by_hand(other.state_dict(), alone, 1.0))
    assert "7 modules" in caplog.text  # two in each of two layers, two outside, a norm


def test_cogvideox_as_diffusers_has_it(checkpoint, pipeline, tmp_path):
    import peft

    kind = "cogvideox1.5-5b"
    pipe = diffusers.CogVideoXPipeline.from_pretrained(checkpoint(kind))
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["to_k", "to_q", "to_v", "to_out.0"], init_lora_weights=False
    )
    pipe.transformer.add_adapter(config)
    diffusers.CogVideoXPipeline.save_lora_weights(
        tmp_path,
        peft.get_peft_model_state_dict(pipe.transformer),
        transformer_lora_adapter_metadata=config.to_dict() | {"target_modules": []},
    )
    pipe.fuse_lora(components=["transformer"])
    pipe.unload_lora_weights()
    assert_same(merged(pipeline(kind), "denoise", str(tmp_path)), pipe.transformer.state_dict())


def test_cogvideox_as_videox_fun_writes_it(checkpoint, pipeline, tmp_path):
    kind = "cogvideox1.5-5b"
    kind_of = diffusers.CogVideoXTransformer3DModel
    transformer = kind_of.from_pretrained(checkpoint(kind), subfolder="transformer")
    names = [
        f"transformer_blocks.1.{name}" for name in ("attn1.to_q", "attn1.to_out.0", "ff.net.0.proj", "norm1.linear")
    ]
    made = files.factors(transformer, names)
    tensors = files.named(made, {name: name for name in names}, "lora_unet__", alpha=2, underscores=True)
    path = files.save(tensors, tmp_path / "x.safetensors")
    assert_same(merged(pipeline(kind), "denoise", path), files.by_hand(transformer.state_dict(), made, 0.5))


HUNYUAN = {
    "transformer_blocks.0.attn.to_q": "double_blocks.0.img_attn_q",
    "transformer_blocks.1.attn.to_k": "double_blocks.1.img_attn_k",
    "transformer_blocks.0.attn.to_out.0": "double_blocks.0.img_attn_proj",
    "transformer_blocks.1.attn.add_q_proj": "double_blocks.1.txt_attn_q",
    "transformer_blocks.1.attn.to_add_out": "double_blocks.1.txt_attn_proj",
    "transformer_blocks.0.ff.net.0.proj": "double_blocks.0.img_mlp.fc1",
    "transformer_blocks.0.ff_context.net.2": "double_blocks.0.txt_mlp.fc2",
    "transformer_blocks.0.norm1.linear": "double_blocks.0.img_mod.linear",
    "context_embedder.proj_in": "txt_in.input_embedder",
    "context_embedder.token_refiner.refiner_blocks.1.ff.net.2": "txt_in.individual_token_refiner.blocks.1.mlp.fc2",
}


@pytest.mark.parametrize("underscores", [False, True])
def test_hunyuan_in_its_own_names(underscores, checkpoint, pipeline, tmp_path):
    """The refiner's queries, keys and values are one matrix there, and the rows of heads are in pairs here."""
    kind = "hunyuanvideo1.5-480p-t2v"
    kind_of = diffusers.HunyuanVideo15Transformer3DModel
    transformer = kind_of.from_pretrained(checkpoint(kind), subfolder="transformer")
    made = files.factors(transformer, HUNYUAN)
    prefix = "lora_unet_" if underscores else "diffusion_model."
    tensors = files.named(made, HUNYUAN, prefix, alpha=2, underscores=underscores)
    refiner = "context_embedder.token_refiner.refiner_blocks.0.attn"
    block = "transformer_blocks.0.attn"
    for names, name in (
        (
            [f"{refiner}.{part}" for part in ("to_q", "to_k", "to_v")],
            "txt_in.individual_token_refiner.blocks.0.self_attn_qkv",
        ),
        ([f"{block}.{part}" for part in ("add_q_proj", "add_k_proj", "add_v_proj")], "double_blocks.0.txt_attn.qkv"),
    ):
        fused = files.factors(transformer, names, seed=1)
        down = next(iter(fused.values()))[0]
        made |= {name: (down, up) for name, (_, up) in fused.items()}
        whole = {"x": (down, torch.cat([up for _, up in fused.values()]))}
        tensors |= files.named(whole, {"x": name}, prefix, alpha=2, underscores=underscores)
    comfy = {
        f"{block}.to_out.0": "double_blocks.0.img_attn.proj",
        "transformer_blocks.1.ff.net.0.proj": "double_blocks.1.img_mlp.0",
    }
    made |= files.factors(transformer, list(comfy), seed=2)
    tensors = {name: value for name, value in tensors.items() if not re.search("0.img_attn.proj", name)}
    more = {name: made[name] for name in comfy}
    tensors |= files.named(more, comfy, prefix, alpha=2, underscores=underscores)
    path = files.save(tensors, tmp_path / "x.safetensors")
    assert_same(merged(pipeline(kind), "denoise", path), files.by_hand(transformer.state_dict(), made, 0.5))


# ---- what is refused


def refusal(pipeline, tensors, tmp_path, metadata=None):
    path = files.save(tensors, tmp_path / "bad.safetensors", metadata)
    with pytest.raises(InvalidRequest) as raised:
        merged(pipeline(KIND), "denoise_high", path)
    assert raised.value.field == "loras"
    return str(raised.value)


@pytest.fixture
def good(transformer):
    names = {"blocks.0.attn1.to_q": "blocks.0.self_attn.q", "blocks.1.ffn.net.2": "blocks.1.ffn.2"}
    return files.named(files.factors(transformer, names), names, "diffusion_model.", alpha=4)


@pytest.mark.parametrize(
    "name",
    [
        "diffusion_model.blocks.0.self_attn.q.dora_scale",
        "diffusion_model.blocks.0.self_attn.q.hada_w1_a",
        "diffusion_model.blocks.0.self_attn.q.lokr_w1",
        "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_mid.weight",
        "diffusion_model.blocks.0.self_attn.v.alpha",
        "diffusion_model.blocks.0.self_attn.v.lora_down.weight",
        "diffusion_model.blocks.0.self_attn.v.lora_up.weight",
    ],
)
def test_what_isnt_understood_is_refused_by_name(name, good, pipeline, tmp_path):
    assert name in refusal(pipeline, good | {name: torch.ones(4, 48)}, tmp_path)


def test_other_models_are_refused_by_name(good, pipeline, tmp_path):
    far = {name.replace("blocks.0", "blocks.30"): value for name, value in good.items()}
    said = refusal(pipeline, far, tmp_path)
    assert "diffusion_model.blocks.30.self_attn.q.lora_down.weight" in said and "another model" in said
    wide = {name: torch.cat([value, value]) if "up" in name else value for name, value in good.items()}
    said = refusal(pipeline, wide, tmp_path)
    assert "blocks.0.self_attn.q.lora_up.weight [96, 4]" in said and "[48, 48]" in said
    said = refusal(pipeline, good | {"diffusion_model.patch_embedding.diff": torch.ones(48, 99, 1, 2, 2)}, tmp_path)
    assert "patch_embedding.diff [48, 99, 1, 2, 2]" in said


def test_damaged_files_are_refused(good, pipeline, tmp_path):
    name = "diffusion_model.blocks.0.self_attn.q.lora_up.weight"
    assert f"NaN or Inf in {name}" in refusal(pipeline, good | {name: good[name] * float("nan")}, tmp_path)
    own = "transformer.blocks.0.attn1.to_q"
    again = {f"{own}.lora_A.weight": torch.ones(4, 48), f"{own}.lora_B.weight": torch.ones(48, 4)}
    assert "twice" in refusal(pipeline, good | again, tmp_path)
    assert "DoRA" in refusal(pipeline, good, tmp_path, {"lora_adapter_metadata": '{"transformer.use_dora": true}'})
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((tmp_path / "bad.safetensors").read_bytes()[:-5])
    with pytest.raises(InvalidRequest, match="cut off"):
        merged(pipeline(KIND), "denoise_high", str(cut))
    for path, said in ((str(tmp_path), "name one of these"), ("/nowhere/x.safetensors", "check the path")):
        with pytest.raises(InvalidRequest, match=said):
            merged(pipeline(KIND), "denoise_high", path)


Q = "diffusion_model.blocks.0.self_attn.q"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (f"{Q}.lora_down.weight", torch.zeros(0, 48)),
        (f"{Q}.lora_up.weight", torch.zeros(48, 0)),
        (f"{Q}.lora_down.weight", torch.ones(48)),
        (f"{Q}.lora_up.weight", torch.ones(48)),
        (f"{Q}.lora_down.weight", torch.tensor(1.0)),
        (f"{Q}.lora_down.weight", torch.ones(4, 48, dtype=torch.int8)),
        (f"{Q}.alpha", torch.zeros(0)),
        (f"{Q}.alpha", torch.ones(4)),
        ("diffusion_model.patch_embedding.diff_b", torch.tensor(1.0)),
        ("diffusion_model.patch_embedding.diff_b", torch.zeros(0)),
    ],
)
def test_tensors_of_impossible_shapes_are_refused_by_name(name, value, good, pipeline, tmp_path):
    assert name in refusal(pipeline, good | {name: value}, tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"lora_alpha": "much"}, "lora_alpha is 'much'"),
        ({"lora_alpha": [8]}, r"lora_alpha is [8]"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"lora_alpha": 8, "alpha_pattern": {"self_attn(": 4}}, "'self_attn(', which names no modules"),
        ({"lora_alpha": 8, "alpha_pattern": {"self_attn.q": None, "ffn.2": 4}}, ""),
        ({"lora_alpha": 8, "alpha_pattern": {"self_attn.q": {}}}, f"{Q}.lora_down.weight needs a number"),
        ({"lora_alpha": 8, "alpha_pattern": ["self_attn.q"]}, "alpha_pattern is ['self_attn.q']"),
        ("[" * 100_000, "alpha is damaged"),
    ],
)
def test_impossible_alphas_of_a_configuration_are_refused(config, said, good, pipeline, tmp_path):
    pairs = {name: value for name, value in good.items() if not name.endswith("alpha")}
    path = files.save(pairs, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if not said:  # null is as good as nothing
        merged(pipeline(KIND), "denoise_high", path)
        return
    with pytest.raises(InvalidRequest) as raised:
        merged(pipeline(KIND), "denoise_high", path)
    assert said in str(raised.value)
    assert raised.value.field == "loras"


def test_made_up_files_are_read_or_refused_whole(pipeline, tmp_path):
    """Whatever stands in a file: `InvalidRequest`, or finite numbers."""
    runtime = pipeline(KIND).runtime
    targets = Targets(runtime.model.components["denoise_high"], runtime.component("denoise_high"))
    read_whole = 0
    for seed in range(120):
        path = files.save_made_up(tmp_path / "x.safetensors", random.Random(seed))
        with contextlib.suppress(InvalidRequest):
            adapter = targets.adapter(path, read(find(path), path))
            read_whole += 1
            gains = [factors.gain for factors in adapter.factors.values()]
            assert all(np.isfinite(array).all() for array in (*gains, *adapter.differences.values())), seed
    assert 5 < read_whole < 100


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{"path": "a", "scale": float("nan")}], "number"),
        (["a:99"], "nearest 10"),
        (["a@middle"], "high, low, both"),
        ([{"path": "a", "strength": 1}], "strength"),
        ([{}], "no path"),
        ([3], "int"),
        ("a.safetensors", "list"),
        (["a"] * 9, "allowed are 8"),
    ],
)
def test_requests_with_impossible_adapters_are_refused(given, said):
    with pytest.raises(InvalidRequest, match=said) as raised:
        GenerationRequest(loras=given)
    assert raised.value.field == "loras"


def test_a_model_of_one_expert_has_no_high_one(pipeline):
    with pytest.raises(InvalidRequest, match="leave @high out"):
        pipeline("wan2.1-t2v-1.3b").resolve(GenerationRequest(loras=["a@high"]))


# ---- what is kept


def test_host_memory_is_bounded_and_files_that_change_are_read_again(pipeline, transformer, tmp_path):
    runtime = pipeline(KIND).runtime
    component, base = runtime.model.components["denoise_high"], runtime.component("denoise_high")
    made = files.factors(transformer, ["blocks.0.attn1.to_q"])
    names = {"blocks.0.attn1.to_q": "blocks.0.attn1.to_q"}
    paths = [files.save(files.named(made, names, ""), tmp_path / f"{i}.safetensors") for i in range(3)]
    size = Targets(component, base).adapter(paths[0], read(find(paths[0]), paths[0])).nbytes
    adapters = Adapters(host_bytes=2 * size)
    first = [adapters.read(component, base, Lora(path)) for path in paths[:2]]
    assert adapters.read(component, base, Lora(paths[0], 0.5)) is first[0]  # the scale is no part of it
    adapters.read(component, base, Lora(paths[2]))  # the second was used longest ago
    assert adapters.read(component, base, Lora(paths[0])) is first[0]
    assert adapters.read(component, base, Lora(paths[1])) is not first[1]
    files.save(files.named(files.factors(transformer, names, seed=5), names, ""), tmp_path / "1.safetensors")
    again = adapters.read(component, base, Lora(paths[1]))
    name = "blocks.template.attn1.to_q.weight"
    assert not np.array_equal(again.factors[name].up, first[1].factors[name].up)


# What a v6e said while a program ran, in GiB (EnzymeAD/Enzyme-JAX, pull request 2422).
V6E = {
    "bytes_in_use": 2.648,
    "peak_bytes_in_use": 2.648,
    "bytes_limit": 31.246,
    "bytes_reserved": 27.251,
    "peak_bytes_reserved": 27.251,
    "bytes_reservable_limit": 28.763,
    "largest_free_block_bytes": 1.347,
}


def v6e(**changed):
    return {name: round(gib * 2**30) for name, gib in (V6E | changed).items()}


def test_room_for_weights_is_what_the_device_says_is_free():
    left = DeviceRoom().bytes_left(v6e())
    assert left == pytest.approx(v6e()["largest_free_block_bytes"], abs=2)
    between_programs = v6e(bytes_reserved=0, largest_free_block_bytes=28.598)
    assert DeviceRoom().bytes_left(between_programs) == left  # The next step reserves them again.


def test_room_for_weights_has_what_requests_took_and_comes_back_with_weights_that_go():
    room, small = DeviceRoom(), {"bytes_reserved": 6, "peak_bytes_reserved": 6}
    room.note_change(v6e(bytes_in_use=7, peak_bytes_in_use=9, **small))  # Reading them took two more for a moment.
    before = v6e(bytes_in_use=7, peak_bytes_in_use=9, **small)
    assert room.bytes_left(before) / 2**30 == pytest.approx(31.246 - 7 - 6)
    busy = v6e(bytes_in_use=8, peak_bytes_in_use=10, **small)  # Requests have one now, and had three.
    assert room.bytes_left(busy) / 2**30 == pytest.approx(31.246 - 8 - 6 - 3)
    room.note_change(v6e(bytes_in_use=22, peak_bytes_in_use=24, **small))
    full = v6e(bytes_in_use=22, peak_bytes_in_use=25, **small)
    assert room.bytes_left(full) / 2**30 == pytest.approx(31.246 - 22 - 6 - 3)
    freed = v6e(bytes_in_use=15, peak_bytes_in_use=25, **small)
    assert room.bytes_left(freed) / 2**30 == pytest.approx(31.246 - 15 - 6 - 3)


def save_factors(transformer, path, seed):
    names = files.blocks(transformer, {"attn1.to_q": "attn1.to_q"})
    return files.save(files.named(files.factors(transformer, names, seed=seed), names, ""), path)


def test_replaced_file_is_used_by_the_next_request(pipeline, transformer, tmp_path):
    """Weights that the old content gave are kept under that content, not under the file's path."""
    path, stage, loaded = tmp_path / "x.safetensors", "denoise_high", pipeline(KIND).runtime.component
    weight = "blocks.template.attn1.to_q.weight"

    def weights(seed):
        asked = (lora_of(save_factors(transformer, path, seed)),)
        return loaded(stage, asked).params[weight]

    first, second = weights(0), weights(1)
    assert np.abs(np.asarray(first) - np.asarray(second)).max() > 0.01
    assert weights(0) is first  # the same content again
    other = save_factors(transformer, tmp_path / "elsewhere.safetensors", 0)
    assert loaded(stage, (lora_of(other),)).params[weight] is first


def test_alpha_that_was_replaced_beside_a_file_is_used(pipeline, transformer, tmp_path):
    path = save_factors(transformer, tmp_path / "adapter_model.safetensors", 0)
    found = []
    for alpha in (4, 8):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
        found.append(merged(pipeline(KIND), "denoise_high", path)["blocks.0.attn1.to_q.weight"])
    assert (found[0] - found[1]).abs().max() > 0.01


def test_request_keeps_the_adapters_that_were_fetched_for_it(pipeline, transformer, tmp_path):
    runtime, path = pipeline(KIND).runtime, tmp_path / "x.safetensors"
    (old,) = runtime.fetch_adapters((lora_of(save_factors(transformer, path, 2)),), ["denoise_high", "denoise_low"])
    expected = np.asarray(runtime.component("denoise_high", (old,)).params["blocks.template.attn1.to_q.weight"])
    for seed in range(3, 3 + KEPT):  # which make the merged weights go
        runtime.component("denoise_high", (lora_of(save_factors(transformer, path, seed)),))
    path.unlink()
    again = np.asarray(runtime.component("denoise_high", (old,)).params["blocks.template.attn1.to_q.weight"])
    assert np.array_equal(again, expected)


def test_file_that_is_replaced_while_it_is_read_is_read_again_later(transformer, tmp_path):
    """Half of it may be of the old one, half of the new one: nobody's input is wrong."""
    path = save_factors(transformer, tmp_path / "x.safetensors", 0)
    found = find(path)
    other = save_factors(transformer, tmp_path / "y.safetensors", 1)
    os.replace(other, path)
    with pytest.raises(Unavailable, match="replaced while it was read"):
        read(found, path)
    assert read(find(path), path)
    found = find(path)
    os.truncate(path, 100)
    with pytest.raises(Unavailable, match="replaced while it was read"):
        read(found, path)
    os.unlink(path)
    with pytest.raises(Unavailable, match="replaced while it was read"):
        read(found, path)


def test_adapters_are_checked_before_anything_is_computed(checkpoint, pipeline, good, tmp_path, monkeypatch, capsys):
    far = {name.replace("blocks.0", "blocks.30"): value for name, value in good.items()}
    path = files.save(far, tmp_path / "far.safetensors")
    files.save(good, tmp_path / "good.safetensors")
    pipe, model = pipeline(KIND), checkpoint(KIND)
    monkeypatch.setattr(Pipeline, "encode", lambda *args: pytest.fail("the encoder has run"))
    with pytest.raises(InvalidRequest, match="another model"):
        pipe.generate(request(loras=[path]))
    with contextlib.closing(OneProcessEngine(pipe)) as engine, pytest.raises(InvalidRequest, match="another model"):
        plan = engine.model.plan(request(loras=[path]))
        asyncio.run(engine.generate(plan, id="a", on_event=lambda span: None))
    for command, output in (("generate", "--output"), ("stage1", "--output_dir")):
        out = str(tmp_path / command)
        assert main([command, "--model_id", str(model), "--prompt", "a cat", "--lora", path, output, out]) == 2
        assert "another model" in capsys.readouterr().err
    manifest = tmp_path / "requests.jsonl"
    loras = [path], ["good.safetensors"], ["/elsewhere/x.safetensors"], ["good.safetensors", path]
    manifest.write_text("\n".join(json.dumps({"prompt": "a cat", "loras": paths}) for paths in loras))
    read_lines = read_manifest(manifest, CheckingPlanner(pipe.runtime.model.spec, str(model)))
    assert [bad.line for bad in read_lines.bad] == [1, 4]
    assert "another model" in read_lines.bad[0].reason
    settings = SimpleNamespace(catalogue=Catalogue({"far": (Lora(path),)}))
    spec = SimpleNamespace(settings=SimpleNamespace(checkpoint=str(model)))
    monkeypatch.setattr(serve_config, "_service", lambda args: (settings, spec))
    with pytest.raises(InvalidRequest, match="another model"):
        serve_config.worker({})


class Stopped(BaseException):
    """As KeyboardInterrupt, which comes at any time."""


def test_base_is_whole_after_a_merge_in_place_was_interrupted(checkpoint, pipeline, transformer, tmp_path, monkeypatch):
    """At any of its weights, before it is changed or after."""
    names = files.blocks(transformer, files.WAN)
    path = files.save(files.named(files.factors(transformer, names), names, ""), tmp_path / "x.safetensors")
    lean = load_pipeline(checkpoint(KIND), "float32", (1, 1, 1), keep_weights=False).runtime
    whole, change = pipeline(KIND).runtime, merging._changed

    def assert_whole(*loras):
        got, expected = (runtime.component("denoise_high", loras).params for runtime in (lean, whole))
        assert got.keys() == expected.keys()
        for name, array in got.items():
            assert np.array_equal(np.asarray(array), np.asarray(expected[name])), name

    for last in range(len(files.WAN)):
        changed = []

        def stop(*call, last=last, changed=changed):
            changed.append(change(*call))
            if len(changed) > last:
                raise Stopped
            return changed[-1]

        monkeypatch.setattr(merging, "_changed", stop)
        with pytest.raises(Stopped):
            lean.component("denoise_high", (lora_of(path),))
        monkeypatch.undo()
        assert_whole()
    assert_whole(lora_of(path))


def test_one_request_in_the_least_memory(checkpoint, pipeline, transformer, tmp_path):
    """Without kept weights the base is changed in place, and read again for the next."""
    names = files.blocks(transformer, files.WAN)
    path = files.save(files.named(files.factors(transformer, names), names, ""), tmp_path / "x.safetensors")
    lean = load_pipeline(checkpoint(KIND), "float32", (1, 1, 1), keep_weights=False)
    for loras in ([path], [], [f"{path}:0.5@low"]):
        asked = request(loras=loras, steps=2)
        made, expected = (denoised(one, asked)[-1].latents for one in (lean, pipeline(KIND)))
        assert np.array_equal(made, expected)
