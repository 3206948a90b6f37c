"""Adapters of Wan 2.1's image modules, CogVideoX, HunyuanVideo, LTX-2 and MiniMax-H3."""

import functools
import re
import types

import diffusers
import pytest
import torch
from diffusers.loaders import lora_conversion_utils

from tests.wan_tpu import adapter_files as files
from tests.wan_tpu.adapter_weights import KIND, assert_same, merge_weights
from wan_tpu.requested_adapter import parse_adapter
from wan_tpu.runtime.runtime import list_adapter_warnings


def test_image_modules_of_wan_2_1_and_their_absence_in_others(checkpoint, pipeline, tmp_path):
    """LightX2V's adapter of Wan 2.2's low-noise expert has modules that Wan 2.1 I2V alone has."""
    kind = "wan2.1-i2v-14b-720p"
    transformer = diffusers.WanTransformer3DModel.from_pretrained(checkpoint(kind), subfolder="transformer")
    names = files.blocks(transformer, files.WAN | files.WAN_IMAGE)
    outer = {
        "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
        "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    }
    factors = files.factors(transformer, names | outer)
    tensors = files.name_tensors(factors, names | outer, "diffusion_model.", alpha=4)
    norm = "blocks.0.attn2.norm_added_k.weight"
    tensors["diffusion_model.blocks.0.cross_attn.norm_k_img.diff"] = torch.ones(transformer.state_dict()[norm].shape)
    path = files.save(tensors, tmp_path / "i2v.safetensors")
    expected = files.by_hand(transformer.state_dict(), factors, 1.0)
    expected[norm] = expected[norm] + 1
    assert_same(merge_weights(pipeline(kind), "denoise", path), expected)

    other = diffusers.WanTransformer3DModel.from_pretrained(checkpoint(KIND), subfolder="transformer_2")
    alone = {name: value for name, value in factors.items() if name in files.blocks(other, files.WAN)}
    got = merge_weights(pipeline(KIND), "denoise_low", f"{path}@low")
    assert_same(got, files.by_hand(other.state_dict(), alone, 1.0))
    [warning] = list_adapter_warnings(pipeline(KIND).runtime.fetch_adapters([parse_adapter(path)], ["denoise_low"]))
    assert "7 modules" in warning  # two in each of two layers, two outside, a norm


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
    assert_same(merge_weights(pipeline(kind), "denoise", str(tmp_path)), pipe.transformer.state_dict())


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


@pytest.mark.parametrize("underscores", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_hunyuan_in_its_own_names(underscores, checkpoint, pipeline, tmp_path):
    """The refiner's queries, keys and values are one matrix there, and the rows of heads are in pairs here."""
    kind = "hunyuanvideo1.5-480p-t2v"
    kind_of = diffusers.HunyuanVideo15Transformer3DModel
    transformer = kind_of.from_pretrained(checkpoint(kind), subfolder="transformer")
    factors = files.factors(transformer, HUNYUAN)
    prefix = "lora_unet_" if underscores else "diffusion_model."
    tensors = files.name_tensors(factors, HUNYUAN, prefix, alpha=2, underscores=underscores)
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
        factors |= {name: (down, up) for name, (_, up) in fused.items()}
        whole = {"x": (down, torch.cat([up for _, up in fused.values()]))}
        tensors |= files.name_tensors(whole, {"x": name}, prefix, alpha=2, underscores=underscores)
    comfy = {
        f"{block}.to_out.0": "double_blocks.0.img_attn.proj",
        "transformer_blocks.1.ff.net.0.proj": "double_blocks.1.img_mlp.0",
    }
    factors |= files.factors(transformer, list(comfy), seed=2)
    tensors = {name: value for name, value in tensors.items() if not re.search("0.img_attn.proj", name)}
    more = {name: factors[name] for name in comfy}
    tensors |= files.name_tensors(more, comfy, prefix, alpha=2, underscores=underscores)
    path = files.save(tensors, tmp_path / "x.safetensors")
    assert_same(merge_weights(pipeline(kind), "denoise", path), files.by_hand(transformer.state_dict(), factors, 0.5))


# Of each kind of module, by the names of LTX-2's own files.
LTX2 = {
    "proj_in": "patchify_proj",
    "audio_proj_in": "audio_patchify_proj",
    "proj_out": "proj_out",
    "time_embed.linear": "adaln_single.linear",
    "audio_time_embed.emb.timestep_embedder.linear_1": "audio_adaln_single.emb.timestep_embedder.linear_1",
    "prompt_adaln.linear": "prompt_adaln_single.linear",
    "audio_prompt_adaln.linear": "audio_prompt_adaln_single.linear",
    "av_cross_attn_video_scale_shift.linear": "av_ca_video_scale_shift_adaln_single.linear",
    "av_cross_attn_audio_scale_shift.linear": "av_ca_audio_scale_shift_adaln_single.linear",
    "av_cross_attn_video_a2v_gate.linear": "av_ca_a2v_gate_adaln_single.linear",
    "av_cross_attn_audio_v2a_gate.linear": "av_ca_v2a_gate_adaln_single.linear",
} | {
    f"transformer_blocks.{layer}.{name}": f"transformer_blocks.{layer}.{name}"
    for layer, name in (
        (0, "attn1.to_q"),
        (1, "attn1.to_out.0"),
        (2, "attn2.to_k"),
        (0, "audio_attn1.to_v"),
        (1, "audio_attn2.to_q"),
        (2, "audio_to_video_attn.to_k"),
        (0, "audio_to_video_attn.to_out.0"),
        (1, "video_to_audio_attn.to_v"),
        (1, "attn1.to_gate_logits"),
        (2, "ff.net.0.proj"),
        (2, "audio_ff.net.2"),
    )
}


@pytest.mark.parametrize("original", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_ltx2_as_diffusers_loads_it(original, checkpoint, pipeline, tmp_path):
    """In the names of diffusers and in those of LTX-2's own files, which have no alpha."""
    kind = "ltx-2.3-distilled"
    pipe = diffusers.LTX2Pipeline.from_pretrained(checkpoint(kind))
    factors = files.factors(pipe.transformer, LTX2)
    names = LTX2 if original else {name: name for name in LTX2}
    prefix = "diffusion_model." if original else "transformer."
    path = files.save(files.name_tensors(factors, names, prefix, "lora_A", "lora_B"), tmp_path / "ltx2.safetensors")
    before = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    pipe.load_lora_weights(path)
    pipe.fuse_lora(components=["transformer"], lora_scale=0.5)
    pipe.unload_lora_weights()
    expected = pipe.transformer.state_dict()
    assert {name for name, value in expected.items() if not torch.equal(value, before[name])} == {
        f"{name}.weight" for name in LTX2
    }
    # Both stages run the same transformer.
    for stage in ("denoise", "refine"):
        assert_same(merge_weights(pipeline(kind), stage, f"{path}:0.5"), expected)


def h3_modules(transformer):
    """Return modules of each kind by the names of MiniMax-H3's own files, with the shapes of their weights."""
    width, inner, hidden = (transformer.config[key] for key in ("hidden_size", "num_attention_heads", "ffn_dim"))
    inner *= transformer.config.attention_head_dim
    of_blocks = {
        "attn.qkv_proj": (3 * inner, width),
        "attn.out_proj": (width, inner),
        "mlp.fc1": (2 * hidden, width),
        "mlp.fc2": (width, hidden),
    }
    own = {
        "video_patch_proj": "proj_in",
        "audio_patch_proj": "audio_proj_in",
        "condition_proj": "context_embedder",
        "time_embedder.proj_in": "time_embedder.linear_1",
        "time_embedder.proj_out": "time_embedder.linear_2",
        "final_layer.adaln_proj.linear": "norm_out.linear",
        "final_layer.video_out": "proj_out",
        "final_layer.audio_out": "audio_proj_out",
        "blocks.2.adaln_proj.linear": "transformer_blocks.2.adaln_proj.linear",
    }
    blocks = ("blocks.0", "blocks.1", "token_refiner.blocks.1")
    return {f"{block}.{name}": shape for block in blocks for name, shape in of_blocks.items()} | {
        name: tuple(transformer.get_submodule(module).weight.shape) for name, module in own.items()
    }


def convert_h3(tensors, head_width):
    """Convert a file of MiniMax-H3's names as diffusers does, which only knows the published width of heads."""
    function = lora_conversion_utils._convert_non_diffusers_minimax_h3_lora_to_diffusers
    constants = tuple(head_width if value == 128 else value for value in function.__code__.co_consts)
    code = function.__code__.replace(co_consts=constants)
    return types.FunctionType(code, function.__globals__)(dict(tensors))


@pytest.mark.parametrize(
    ("prefix", "ends", "alpha"),
    [
        ("", ("lora_A", "lora_B"), None),  # MiniMax' own program, ComfyUI
        pytest.param("diffusion_model.", ("lora_A", "lora_B"), 2, marks=pytest.mark.thorough),  # ai-toolkit
        ("lora_unet_", ("lora_down", "lora_up"), 2),  # musubi-tuner
        ("", ("lora_A.default", "lora_B.default"), None),  # DiffSynth, whose queries, keys, values lie head by head
    ],
)
def test_minimax_h3_as_diffusers_converts_it(prefix, ends, alpha, checkpoint, pipeline, tmp_path):
    kind = "minimax-h3"
    transformer = diffusers.MiniMaxH3Transformer3DModel.from_pretrained(checkpoint(kind), subfolder="transformer")
    modules = h3_modules(transformer)
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    pairs = {name: (draw(3, inputs) / inputs**0.5, draw(outputs, 3) / 5) for name, (outputs, inputs) in modules.items()}
    names = {name: name for name in modules}
    tensors = files.name_tensors(pairs, names, prefix, *ends, alpha=alpha, underscores=prefix == "lora_unet_")
    path = files.save(tensors, tmp_path / "h3.safetensors")
    converted = convert_h3(tensors, transformer.config.attention_head_dim)
    factors = {
        name.removeprefix("transformer.").removesuffix(".lora_A.weight"): (down, converted[name.replace("_A.", "_B.")])
        for name, down in converted.items()
        if name.endswith("lora_A.weight")
    }
    assert len(factors) == len(modules) + 2 * 3
    state = transformer.state_dict()
    assert_same(merge_weights(pipeline(kind), "denoise", path), files.by_hand(state, factors, 1.0))
    if ends == ("lora_A", "lora_B") and not prefix:  # In diffusers' own names the rows are as they are.
        own = files.save(converted, tmp_path / "own.safetensors")
        assert_same(merge_weights(pipeline(kind), "denoise", own), files.by_hand(state, factors, 1.0))


@pytest.mark.long
def test_minimax_h3_as_fastvideo_writes_it(checkpoint, pipeline, tmp_path):
    """Pairs without alpha, and whole differences of norms, of biases, and of a matrix that has a pair as well."""
    kind = "minimax-h3"
    transformer = diffusers.MiniMaxH3Transformer3DModel.from_pretrained(checkpoint(kind), subfolder="transformer")
    expected, tensors = dict(transformer.state_dict()), {}
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    for name in ("transformer_blocks.0.attn.norm_q.weight", "proj_in.weight", "proj_in.bias"):
        change = draw(expected[name].shape)
        expected[name] = expected[name] + change
        tensors[name.replace(".weight", ".diff").replace(".bias", ".diff_b")] = change
    for name in ("transformer_blocks.1.attn.to_q", "proj_in"):
        outputs, inputs = expected[f"{name}.weight"].shape
        down, up = draw(3, inputs), draw(outputs, 3)
        expected[f"{name}.weight"] = expected[f"{name}.weight"] + up @ down
        tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    path = files.save(tensors, tmp_path / "fasth3.safetensors")
    assert_same(merge_weights(pipeline(kind), "denoise", path), expected)
