"""What Lightricks' own program, 1.2.0, makes of LTX-2.5, with a small checkpoint's weights.

`scripts/compare_ltx_25.py` runs this file in an environment of its own, in which wan-tpu isn't installed. The
checkpoint is written in Lightricks' own format, from which their loaders, pipelines and samplers read and run as they
are, on a CPU, with these exceptions:

- They compute in bfloat16; here in float32, also where they add an adapter's products to weights.
- Small models have fewer layers and channels than the constants in their code say.
- Videos are decoded in one piece; they choose tiles by the memory of the device. Of the diffusion decoder's modes it is
  the one without parts of a picture, uncompiled. Their default mode repeats the outermost columns beyond the left and
  the right border to save memory, where this mode moves windows inwards.
- There is no processor of images and sounds for Gemma, which only rewrites prompts with it.
"""

import functools
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ltx_core.loader import LTXV_LORA_COMFY_RENAMING_MAP, LoraPathStrengthAndSDOps, fuse_loras
from ltx_core.model.video_vae.transformer import DiffVAEMode
from ltx_core.model.video_vae.transformer.config import DiffVAEBlockKind, DiffVAEConfig, NAttentionKind
from ltx_core.text_encoders.gemma.encoders import base_encoder
from ltx_core.types import VIDEO_SCALE_FACTORS, VideoLatentShape
from ltx_names import STATISTICS, TRANSFORMER_NAMES, Float32, list_encoder_blocks
from ltx_pipelines import distilled, ti2vid_one_stage, ti2vid_two_stages
from ltx_pipelines.utils import args, constants, helpers
from ltx_pipelines.utils.blocks import DurationPredictor
from ltx_pipelines.utils.model_paths import ModelPaths
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
UPSAMPLING = {"spatial": "compress_space", "temporal": "compress_time", "spatiotemporal": "compress_all"}
VOCODER_NAMES = {
    "conv_in": "conv_pre",
    "conv_out": "conv_post",
    "act_out": "act_post",
    "upsamplers": "ups",
    "resnets": "resblocks",
    "downsample.filter": "downsample.lowpass.filter",
}
# What their transformer demands of a configuration, and diffusers' hasn't.
DEMANDED: dict[str, Any] = {
    "dropout": 0.0,
    "attention_bias": True,
    "num_vector_embeds": None,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "use_linear_projection": False,
    "only_cross_attention": False,
    "cross_attention_norm": True,
    "double_self_attention": False,
    "upcast_attention": False,
    "standardization_norm": "rms_norm",
    "norm_elementwise_affine": False,
    "qk_norm": "rms_norm",
    "positional_embedding_type": "rope",
    "use_audio_video_cross_attention": True,
    "share_ff": False,
    "av_cross_ada_norm": True,
    "use_middle_indices_grid": True,
}

WHOLE = DiffVAEConfig(
    block=DiffVAEBlockKind.COMBINED,
    w_chunks=1,
    natten_backend=None,
    attention=NAttentionKind.EAGER_SDPA,
    compile_blocks=False,
    compile_det_stages=False,
)


class Recorded:
    """A block of a pipeline that passes what goes in and what comes out on to a function."""

    def __init__(self, block: Any, keep: Callable[..., None]) -> None:
        self._block, self._keep = block, keep

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        result = self._block(*inputs, **options)
        self._keep(result, *inputs)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


def write_original(folder: Path, target: Path) -> None:
    """Write a checkpoint of diffusers as Lightricks' files: one with all but Gemma, and one with the other decoder."""
    configs = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/config.json")}
    transformer, vae = _rename_transformer(_load(folder, "transformer")), _rename_vae(_load(folder, "vae"))
    config = _write_config(configs)
    tensors = transformer | _rename_connectors(_load(folder, "connectors")) | vae
    tensors |= _rename_sound(_load(folder, "audio_vae"), _load(folder, "vocoder"))
    tensors |= _rename_head(_load(folder, "duration_head"))
    _save(tensors, config, target / "model.safetensors")
    encoder = {name: value for name, value in vae.items() if ".decoder." not in name}
    diffusion = encoder | _rename_diffusion_decoder(_load(folder, "diffusion_decoder"))
    _save(diffusion, {"vae": _write_diffusion_vae(configs)}, target / "diffusion.safetensors")
    upsampler = configs["latent_upsampler"]
    upsampler |= {"rational_resampler": upsampler["use_rational_resampler"]}
    _save(_load(folder, "latent_upsampler"), upsampler, target / "upsampler.safetensors")
    _copy_gemma(folder, configs["text_encoder"], target / "gemma")


def _load(folder: Path, part: str) -> Tensors:
    [file] = (folder / part).glob("*.safetensors")
    return load_file(file)


def _save(tensors: Tensors, config: Mapping[str, Any], file: Path) -> None:
    contents = {name: value.contiguous() for name, value in tensors.items()}
    save_file(contents, file, metadata={"config": json.dumps(config), "model_version": "2.5.0"})


def _replace(names: Mapping[str, str], name: str) -> str:
    """Replace every part of a name that is a key, the longest first."""
    pattern = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(pattern, lambda match: names[match[0]], name)


def _rename_transformer(tensors: Tensors) -> Tensors:
    ours = {value: key for key, value in TRANSFORMER_NAMES.items()}
    return {f"model.diffusion_model.{_replace(ours, name)}": value for name, value in tensors.items()}


def _rename_connectors(tensors: Tensors) -> Tensors:
    names = {
        "video_text_proj_in": "text_embedding_projection.video_aggregate_embed",
        "audio_text_proj_in": "text_embedding_projection.audio_aggregate_embed",
        "video_connector": "model.diffusion_model.video_embeddings_connector",
        "audio_connector": "model.diffusion_model.audio_embeddings_connector",
        "transformer_blocks": "transformer_1d_blocks",
        "norm_q": "q_norm",
        "norm_k": "k_norm",
    }
    return {_replace(names, name): value for name, value in tensors.items()}


def _rename_vae(tensors: Tensors) -> Tensors:
    names = {f"down_blocks.{i}.resnets": f"down_blocks.{2 * i}.res_blocks" for i in range(4)}
    names |= {f"down_blocks.{i}.downsamplers.0": f"down_blocks.{2 * i + 1}" for i in range(4)}
    names |= {f"up_blocks.{i}.upsamplers.0": f"up_blocks.{2 * i + 1}" for i in range(4)}
    names |= {f"up_blocks.{i}.resnets": f"up_blocks.{2 * i + 2}.res_blocks" for i in range(4)}
    names |= {"encoder.mid_block.resnets": "encoder.down_blocks.8.res_blocks"}
    names |= {"decoder.mid_block.resnets": "decoder.up_blocks.0.res_blocks"}
    return {f"vae.{_replace(names | _statistics(), name)}": value for name, value in tensors.items()}


def _statistics() -> dict[str, str]:
    return {ours: f"per_channel_statistics.{theirs}" for theirs, ours in STATISTICS.items()}


def _rename_sound(vae: Tensors, vocoder: Tensors) -> Tensors:
    renamed = {f"audio_vae.{_replace(_statistics(), name)}": value for name, value in vae.items()}
    return renamed | {f"vocoder.{_replace(VOCODER_NAMES, name)}": value for name, value in vocoder.items()}


def _join(tensors: Tensors, path: str, kind: str) -> torch.Tensor:
    return torch.cat([tensors.pop(f"{path}.to_{letter}.{kind}") for letter in "qkv"])


def _rename_head(tensors: Tensors) -> Tensors:
    pooler = "attention_pooler"
    for kind in ("weight", "bias"):
        tensors[f"{pooler}.cross_attn.in_proj_{kind}"] = _join(tensors, pooler, kind)
        tensors[f"{pooler}.cross_attn.out_proj.{kind}"] = tensors.pop(f"{pooler}.to_out.{kind}")
    return {f"duration_head.{name}": value for name, value in tensors.items()}


def _rename_diffusion_decoder(tensors: Tensors) -> Tensors:
    for path in [name.removesuffix(".to_q.weight") for name in tensors if name.endswith(".to_q.weight")]:
        for kind in ("weight", "bias"):
            tensors[f"{path}.qkv.{kind}"] = _join(tensors, path, kind)
    names = {"to_out.0": "proj", "norm_q": "q_norm", "norm_k": "k_norm"}
    names |= {f"timestep_embedder.linear_{i + 1}": f"mlp.{2 * i}" for i in range(2)}
    return {f"vae.{_replace(names | _statistics(), name)}": value for name, value in tensors.items()}


def _write_config(configs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the file with everything, from diffusers' for each part."""
    model, text, vae = configs["transformer"], configs["connectors"], configs["vae"]
    same = (
        "num_attention_heads attention_head_dim in_channels out_channels num_layers cross_attention_dim norm_eps "
        "timestep_scale_multiplier audio_num_attention_heads audio_attention_head_dim audio_in_channels "
        "audio_out_channels audio_cross_attention_dim rope_type use_prompt_adaln_single ff_bias audio_ff_bias "
        "use_keyframes_abs_pos_embedding"
    )
    transformer = {key: model[key] for key in same.split()}
    transformer |= DEMANDED | {
        "positional_embedding_theta": model["rope_theta"],
        "positional_embedding_max_pos": [model["pos_embed_max_pos"], model["base_height"], model["base_width"]],
        "audio_positional_embedding_max_pos": [model["audio_pos_embed_max_pos"]],
        "av_ca_timestep_scale_multiplier": model["cross_attn_timestep_scale_multiplier"],
        "frequencies_precision": "float64" if model["rope_double_precision"] else "float32",
        "apply_gated_attention": model["gated_attn"],
        "cross_attention_adaln": model["cross_attn_mod"],
        "caption_proj_before_connector": True,
        "caption_projection_first_linear": False,
        "caption_proj_input_norm": False,
        "caption_projection_second_linear": False,
        "connector_positional_embedding_max_pos": [text["connector_rope_base_seq_len"]],
        "connector_apply_gated_attention": text["video_gated_attn"],
    }
    for theirs, ours in (("connector", "video_connector"), ("audio_connector", "audio_connector")):
        for key in ("num_attention_heads", "attention_head_dim", "num_layers"):
            transformer[f"{theirs}_{key}"] = text[f"{ours}_{key}"]
    head = configs["duration_head"]
    return {
        "transformer": transformer,
        "vae": _write_vae(vae),
        "audio_vae": _write_audio_vae(configs["audio_vae"]),
        "vocoder": _write_vocoder(configs["vocoder"]),
        "duration_head": {
            "pooler_hidden_dim": head["pooler_hidden_dim"],
            "num_queries": head["num_queries"],
            "num_pooler_heads": head["num_pooler_heads"],
            "mlp_hidden": head["mlp_hidden_dim"],
        },
    }


def _write_vae(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, factors = config["decoder_layers_per_block"], config["upsample_factor"]
    blocks: list[Any] = [("res_x", {"num_layers": layers[-1]})]
    for i, kind in enumerate(config["upsample_type"]):
        blocks.append((UPSAMPLING[kind], {"multiplier": factors[-1 - i]}))
        blocks.append(("res_x", {"num_layers": layers[-2 - i]}))
    return {
        "_class_name": "CausalVideoAutoencoder",
        "latent_channels": config["latent_channels"],
        "patch_size": config["patch_size"],
        "encoder_blocks": list_encoder_blocks(dict(config)),
        "decoder_blocks": blocks[::-1],
        "decoder_base_channels": config["decoder_block_out_channels"][-1] // np.prod(factors).item(),
        "causal_decoder": config["decoder_causal"],
        "timestep_conditioning": config["timestep_conditioning"],
        "encoder_spatial_padding_mode": config["encoder_spatial_padding_mode"],
        "spatial_padding_mode": config["decoder_spatial_padding_mode"],
    }


def _write_diffusion_vae(configs: Mapping[str, Any]) -> dict[str, Any]:
    vae, config = configs["vae"], configs["diffusion_decoder"]
    strides = zip(config["decoder_upsample_strides"], config["decoder_upsample_channel_reductions"], strict=True)
    return {
        "_class_name": "CausalDiffusionVAE",
        "model_output_type": config["decoder_model_output_type"],
        "encoder": {
            "out_channels": vae["latent_channels"],
            "blocks": list_encoder_blocks(vae),
            "patch_size": vae["patch_size"],
            "spatial_padding_mode": vae["encoder_spatial_padding_mode"],
        },
        "decoder": {
            "in_channels": config["latent_channels"],
            "patch_size": config["patch_size"],
            "head_dim": config["decoder_head_dim"],
            "stage_channels": config["decoder_stage_channels"],
            "stage_depths": config["decoder_stage_depths"],
            # They want a kernel for the fifth stage here, too, and take the other one.
            "stage_kernels": [*config["decoder_stage_kernels"], config["decoder_stage5_kernel"]],
            "stage5_kernel": config["decoder_stage5_kernel"],
            "upsamples": list(strides),
            "t_emb_dim": config["decoder_t_emb_dim"],
            "timestep_scale_multiplier": config["decoder_timestep_scale_multiplier"],
            "default_num_inference_steps": config["decoder_num_inference_steps"],
        },
    }


def _write_audio_vae(config: Mapping[str, Any]) -> dict[str, Any]:
    same = "ch_mult num_res_blocks resolution norm_type causality_axis dropout mid_block_add_attention mel_bins"
    shape = {key: config[key] for key in same.split()}
    shape |= {"ch": config["base_channels"], "out_ch": config["output_channels"], "attn_resolutions": []}
    shape |= {"z_channels": config["latent_channels"]}
    stft = {"hop_length": config["mel_hop_length"], "causal": config["is_causal"]}
    params = {"ddconfig": shape, "sampling_rate": config["sample_rate"]}
    return {"model": {"params": params}, "preprocessing": {"stft": stft}}


def _write_vocoder(config: Mapping[str, Any]) -> dict[str, Any]:
    def describe(prefix: str) -> dict[str, Any]:
        return {
            "resblock": "AMP1",
            "stereo": True,
            "activation": config[f"{prefix}act_fn"],
            "resblock_kernel_sizes": config[f"{prefix}resnet_kernel_sizes"],
            "resblock_dilation_sizes": config[f"{prefix}resnet_dilations"],
            "upsample_rates": config[f"{prefix}upsample_factors"],
            "upsample_kernel_sizes": config[f"{prefix}upsample_kernel_sizes"],
            "upsample_initial_channel": config[f"{prefix}hidden_channels"],
            "use_tanh_at_final": config[f"{prefix}final_act_fn"] == "tanh",
            "use_bias_at_final": config[f"{prefix}final_bias"],
        }

    extension = describe("bwe_") | {
        "n_fft": config["filter_length"],
        "hop_length": config["hop_length"],
        "num_mels": config["num_mel_channels"],
        "input_sampling_rate": config["input_sampling_rate"],
        "output_sampling_rate": config["output_sampling_rate"],
    }
    return {"vocoder": describe(""), "bwe": extension}


def _copy_gemma(folder: Path, config: dict[str, Any], target: Path) -> None:
    """Copy Gemma and its tokenizer, with the configuration that transformers before 5.15 reads."""
    shutil.copytree(folder / "text_encoder", target)
    shutil.copytree(folder / "tokenizer", target, dirs_exist_ok=True)
    text = config["text_config"]
    wide = {(layer["head_dim"], layer["num_key_value_heads"]) for layer in text.pop("per_layer_config").values()}
    [(text["global_head_dim"], text["num_global_key_value_heads"])] = wide
    (target / "config.json").write_text(json.dumps(config))
    (target / "processor_config.json").write_text("{}")


def run(case: Mapping[str, Any], files: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return texts, latents, pixels and sound, and the settings that their command line has by default.

    Args:
        case: What is made: see `make_cases` of scripts/compare_ltx_25.py.
        files: A folder that `write_original` has written.
    """
    checkpoint, upsampler, gemma = (
        str(files / name) for name in ("model.safetensors", "upsampler.safetensors", "gemma")
    )
    decoder = str(files / "diffusion.safetensors") if case["decoder"] == "diffusion" else None
    paths = ModelPaths.from_monolith(checkpoint, gemma, video_vae_path=decoder)
    params, cpu = constants.detect_params(checkpoint), torch.device("cpu")
    is_distilled, adapter = case["kind"].endswith("distilled"), case["adapter"]
    required = {"--gemma-root": gemma, "--prompt": case["prompt"], "--output-path": str(files / "out.mp4")}
    required["--distilled-checkpoint-path" if is_distilled else "--checkpoint-path"] = checkpoint
    if is_distilled or adapter:
        required["--spatial-upsampler-path"] = upsampler
    module: Any
    if is_distilled:
        module, parse = distilled, args.default_2_stage_distilled_arg_parser
        pipeline = _build(module, distilled.DistilledPipeline, paths, upsampler, [], device=cpu)
    elif adapter:
        module, parse = ti2vid_two_stages, args.default_2_stage_arg_parser
        required["--distilled-lora"] = adapter
        loras = [LoraPathStrengthAndSDOps(adapter, 1.0, LTXV_LORA_COMFY_RENAMING_MAP)]
        pipeline = _build(module, ti2vid_two_stages.TI2VidTwoStagesPipeline, paths, loras, upsampler, [], device=cpu)
    else:
        module, parse = ti2vid_one_stage, args.default_1_stage_arg_parser
        pipeline = _build(module, ti2vid_one_stage.TI2VidOneStagePipeline, paths, [], device=cpu)
    words = [word for pair in required.items() for word in pair]
    defaults = vars(parse(params=params, supports_auto_duration=True).parse_args(words))

    kept: dict[str, np.ndarray] = {}

    def keep_texts(contexts: Any, *_: Any) -> None:
        for number, context in enumerate(contexts):
            kept[f"text text {number}"] = context.video_encoding.numpy()
            kept[f"text audio_text {number}"] = context.audio_encoding.numpy()

    pipeline.prompt_encoder = Recorded(pipeline.prompt_encoder, keep_texts)
    pipeline.video_decoder = Recorded(pipeline.video_decoder, lambda _, x, *rest: kept.update(video=x.numpy()))
    pipeline.audio_decoder = Recorded(pipeline.audio_decoder, lambda _, x: kept.update(sound=x.numpy()))
    options: dict[str, Any] = {}
    if not is_distilled:
        layers = case["layers"]
        for name in ("video_guider_params", "audio_guider_params"):
            guider = getattr(params, name)
            # The same place among fewer layers.
            options[name] = replace(guider, stg_blocks=[block * layers // 48 for block in guider.stg_blocks])
        options |= {"negative_prompt": defaults["negative_prompt"], "num_inference_steps": case["steps"]}
    with torch.inference_mode():
        chunks, sound, *_ = pipeline(
            prompt=case["prompt"],
            seed=case["seed"],
            height=case["height"],
            width=case["width"],
            num_frames=case["frames"],
            frame_rate=defaults["frame_rate"],
            images=[args.ImageConditioningInput(case["image"], 0, 1.0)] if case["image"] else [],
            tiling_config=None,
            **options,
        )
        kept["pixels"] = torch.cat(list(chunks)).numpy()
    kept["samples"] = sound.waveform.numpy()
    names = {"height": "height", "width": "width", "frame_rate": "fps"}
    if not is_distilled:
        names |= {"num_inference_steps": "steps", "negative_prompt": "negative_prompt"}
        names |= {"video_cfg_guidance_scale": "guidance_scale"}
    settings = {ours: defaults[theirs] for theirs, ours in names.items()}
    if adapter:
        settings["steps"] += len(constants.STAGE_2_DISTILLED_SIGMA_VALUES) - 1
    return kept, settings


def _build(module: Any, pipeline: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    module.torch = Float32("torch")
    return pipeline(*inputs, **options)


def measure_lengths(grid: Mapping[str, Any]) -> np.ndarray:
    """Return the frames for each rate, longest length and number of seconds that the duration head may choose."""
    return np.array(
        [
            helpers.seconds_to_clamped_num_frames(
                seconds, frame_rate=fps, min_frames=round(fps), max_frames=round(most * fps)
            )
            for fps in grid["fps"]
            for most in grid["most"]
            for seconds in grid["seconds"]
        ]
    )


def choose_seconds(files: Path, made: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the seconds that the duration head chooses for a prompt."""
    head = DurationPredictor.from_checkpoint(str(files / "model.safetensors"), torch.float32, torch.device("cpu"))
    texts = (torch.from_numpy(made[f"text {name} 0"]) for name in ("text", "audio_text"))
    with torch.inference_mode():
        return np.asarray(head._head(*texts).numpy())


def main(given: Path, out: Path) -> None:
    """Run all cases of a file."""
    object.__setattr__(fuse_loras.bf16_fuse_rule, "aggregation_dtype", torch.float32)
    DiffVAEMode.resolve = lambda _: WHOLE
    base_encoder.build_gemma_processor = lambda *_: None
    contents, results = json.loads(given.read_text()), dict[str, Any]()
    [channels] = {case["channels"] for case in contents["cases"].values()}
    VideoLatentShape.from_pixel_shape.__defaults__ = channels, VIDEO_SCALE_FACTORS
    originals = functools.cache(lambda folder: _convert(Path(folder), out.parent))
    for name, case in contents["cases"].items():
        files = originals(case["folder"])
        made, settings = run(case, files)
        results |= {f"{name} {part}": value for part, value in made.items()}
        results |= {f"{name} settings": np.array(json.dumps(settings)), f"{name} seconds": choose_seconds(files, made)}
    np.savez(out, lengths=measure_lengths(contents["lengths"]), **results)


def _convert(folder: Path, target: Path) -> Path:
    files = target / f"original {folder.name}"
    files.mkdir()
    write_original(folder, files)
    return files


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
