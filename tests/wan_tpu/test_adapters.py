"""Adapters: what is made of files in the wild is what diffusers makes of them, or what is computed by hand."""

import json

import diffusers
import numpy as np
import pytest
import torch

from tests.conftest import record_steps
from tests.wan_tpu import adapter_files as files
from tests.wan_tpu.adapter_weights import KIND, RELATIVE, assert_same, merge_weights, request
from tests.wan_tpu.diffusers_steps import keep_latents
from tests.wan_tpu.test_parity import PIXEL_TOLERANCE


def fuse_with_diffusers(folder, path, stage, scale=1.0, **more):
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


@pytest.mark.parametrize(
    ("form", "stage"), [("lightx2v", "denoise_high"), ("diffusion-pipe", "denoise_high"), ("musubi", "denoise_low")]
)
def test_files_in_wans_names_are_applied_as_diffusers_does(form, stage, checkpoint, pipeline, transformer, tmp_path):
    prefix, down, up, alpha, underscores = FORMATS[form]
    names = files.blocks(transformer, files.WAN)
    factors = files.factors(transformer, names)
    tensors = files.name_tensors(factors, names, prefix, down, up, alpha=alpha, underscores=underscores)
    path = files.save(tensors, tmp_path / "lora.safetensors")
    expert = stage.removeprefix("denoise_")

    got = merge_weights(pipeline(KIND), stage, f"{path}:0.7@{expert}")

    expected = fuse_with_diffusers(checkpoint(KIND), path, stage, 0.7)
    assert_same(got, expected)
    base = merge_weights(pipeline(KIND), stage)
    assert (got["blocks.1.attn1.to_q.weight"] - base["blocks.1.attn1.to_q.weight"]).abs().max() > 0.01
    other = "low" if expert == "high" else "high"
    assert pipeline(KIND).plan(request(loras=[f"{path}@{other}"])).request.adapters_for(stage) == ()


@pytest.mark.parametrize("form", OTHER_FORMATS)
def test_files_of_other_trainers_are_applied(form, pipeline, transformer, tmp_path):
    prefix, down, up, alpha, underscores, own = OTHER_FORMATS[form]
    names = files.blocks(transformer, files.WAN)
    factors = files.factors(transformer, names)
    written = {name: name if own else original for name, original in names.items()}
    tensors = files.name_tensors(factors, written, prefix, down, up, alpha=alpha, underscores=underscores)
    path = files.save(tensors, tmp_path / "x.safetensors")
    expected = files.by_hand(transformer.state_dict(), factors, 1.0 if alpha is None else alpha / 4)
    assert_same(merge_weights(pipeline(KIND), "denoise_high", path), expected)


def test_factors_without_weight_in_their_names_and_norms_of_lycoris_are_applied(pipeline, transformer, tmp_path):
    state, norm = transformer.state_dict(), "blocks.0.norm2"
    factors = files.factors(transformer, ["blocks.0.attn1.to_q"])
    tensors = files.name_tensors(factors, {"blocks.0.attn1.to_q": "blocks.0.attn1.to_q"}, "")
    tensors = {name.removesuffix(".weight"): value for name, value in tensors.items()}
    tensors |= {f"{norm}.w_norm": torch.ones(48), f"{norm}.b_norm": torch.full((48,), 2.0)}
    expected = files.by_hand(state, factors, 1.0)
    expected |= {f"{norm}.weight": state[f"{norm}.weight"] + 1, f"{norm}.bias": state[f"{norm}.bias"] + 2}
    path = files.save(tensors, tmp_path / "x.safetensors")
    assert_same(merge_weights(pipeline(KIND), "denoise_high", path), expected)


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
    assert_same(merge_weights(pipeline(KIND), "denoise_high", str(tmp_path)), pipe.transformer.state_dict())


def test_peft_adapter_folder(pipeline, transformer, tmp_path):
    """peft's own file has alpha beside it alone."""
    names = files.blocks(transformer, {"attn1.to_q": "attn1.to_q"})
    factors = files.factors(transformer, names)
    tensors = files.name_tensors(factors, names, "base_model.model.", "lora_A", "lora_B")
    files.save(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 6, "use_rslora": True}))
    expected = files.by_hand(transformer.state_dict(), factors, 6 / 2)
    assert_same(merge_weights(pipeline(KIND), "denoise_high", str(tmp_path)), expected)


def test_what_diffusers_drops_is_applied(pipeline, transformer, tmp_path):
    """A file like Lightning's: diffusers forgets differences of norms, modulations, patch embedding and output."""
    state = transformer.state_dict()
    names = files.blocks(transformer, files.WAN) | files.WAN_OUTER
    factors = files.factors(transformer, names)
    tensors = files.name_tensors(factors, names, "diffusion_model.", alpha=4)
    differences = {
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
    expected = files.by_hand(state, factors, 1.0)
    for own, name in differences.items():
        tensors[f"diffusion_model.{name}"] = torch.randn(state[own].shape, generator=generator)
    path = files.save(tensors, tmp_path / "lightning.safetensors")
    twice = files.by_hand(state, factors, 0.5)
    for own, name in differences.items():
        expected[own] = expected[own] + tensors[f"diffusion_model.{name}"]
        twice[own] = twice[own] + 0.5 * tensors[f"diffusion_model.{name}"]
    assert_same(merge_weights(pipeline(KIND), "denoise_high", path), expected)
    assert_same(merge_weights(pipeline(KIND), "denoise_high", f"{path}:0.5"), twice)


def test_bias_of_peft_follows_alpha(pipeline, transformer, tmp_path):
    layer = "blocks.0.attn1.to_q"
    factors = files.factors(transformer, [layer])
    tensors = files.name_tensors(factors, {layer: layer}, "transformer.", "lora_A", "lora_B")
    bias = torch.arange(48.0)
    tensors |= {"transformer.blocks.0.attn1.to_q.lora_B.bias": bias}
    header = {"lora_adapter_metadata": json.dumps({"transformer.r": 4, "transformer.lora_alpha": 2})}
    path = files.save(tensors, tmp_path / "x.safetensors", header)
    expected = files.by_hand(transformer.state_dict(), factors, 0.5)
    expected["blocks.0.attn1.to_q.bias"] = expected["blocks.0.attn1.to_q.bias"] + 0.5 * bias
    assert_same(merge_weights(pipeline(KIND), "denoise_high", path), expected)


def test_several_adapters_add_up(pipeline, transformer, tmp_path):
    """Of different ranks, over different layers, one of them partial; the order doesn't matter."""
    state = transformer.state_dict()
    first = files.factors(transformer, ["blocks.0.attn1.to_q", "blocks.1.ffn.net.2"], rank=4)
    second = files.factors(transformer, ["blocks.1.attn1.to_q"], rank=24, seed=1)
    names = {name: name for name in (*first, *second)}
    first_path = files.save(files.name_tensors(first, names, ""), tmp_path / "one.safetensors")
    second_path = files.save(files.name_tensors(second, names, "", alpha=12), tmp_path / "two.safetensors")
    expected = files.by_hand(files.by_hand(state, first, 2.0), second, -0.5 * 12 / 24)
    assert_same(merge_weights(pipeline(KIND), "denoise_high", f"{first_path}:2", f"{second_path}:-0.5"), expected)


def test_a_video_is_that_of_diffusers_with_the_same_pair(checkpoint, pipeline, transformer, tmp_path):
    names = files.blocks(transformer, files.WAN)
    paths = {}
    for seed, expert in enumerate(("high", "low")):
        tensors = files.name_tensors(files.factors(transformer, names, seed=seed), names, "diffusion_model.", alpha=4)
        paths[expert] = files.save(tensors, tmp_path / f"{expert}.safetensors")
    ours = pipeline(KIND)
    adapted = request(loras=[f"{path}@{expert}" for expert, path in paths.items()], steps=2)
    noise = np.random.default_rng(0).standard_normal(ours.runtime.model.spec.latent_shape(ours.plan(adapted).request))
    noise = noise.astype(np.float32)
    pipe = diffusers.WanPipeline.from_pretrained(checkpoint(KIND))
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = diffusers.UniPCMultistepScheduler.from_config(pipe.scheduler.config, flow_shift=5.0)
    pipe.load_lora_weights(paths["high"], adapter_name="a")
    pipe.load_lora_weights(paths["low"], adapter_name="b", load_into_transformer_2=True)
    pipe.fuse_lora(components=["transformer", "transformer_2"])
    expected = []

    frames = pipe(
        prompt="a cat", height=64, width=96, num_frames=9, num_inference_steps=2, guidance_scale=1.0,
        latents=torch.from_numpy(noise), callback_on_step_end=keep_latents(expected), output_type="np",
    ).frames[0]  # fmt: skip
    before = record_steps(ours, request(steps=2), noise)[-1].latents

    events = []
    video = ours.generate(adapted, noise=noise, on_step=lambda event: events.append(event.latents))

    assert len(events) == len(expected) == 2
    for got, reference in zip(events, expected, strict=True):
        assert np.abs(got - reference).max() <= RELATIVE * np.abs(reference).max()
    assert np.abs(video.pixels - frames).max() <= PIXEL_TOLERANCE
    assert np.abs(events[-1] - before).max() > 0.01
    assert np.array_equal(record_steps(ours, request(steps=2), noise)[-1].latents, before)  # the base again, to the bit
