"""What mlx-h3 0.0.1a3 of PyPI makes of prompts with a small MiniMax-H3 checkpoint's weights, in float32 on a CPU.

`scripts/compare_h3.py` runs this file in an environment of its own, in which wan-tpu isn't installed. mlx-h3 is an
independent program for Apple's machines: its modules, layout, sampling and decoders run as they are, with these
exceptions:

- Sizes are the small checkpoint's, and weights have the names and the order of rows that mlx-h3 reads.
- Steps are Euler's, by its `euler_step`; its own command takes those of a multistep solver.
"""

import itertools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_h3 import layout, sampler
from mlx_h3.audio_vae import AudioVAE, AudioVAEConfig
from mlx_h3.model import H3Config, MiniMaxH3
from mlx_h3.text_encoder import TextEncoder, TextEncoderConfig
from mlx_h3.video_vae import VideoVAE, VideoVAEConfig

# The names of the transformer's parts in its own files, as in diffusers' scripts/convert_minimax_h3_to_diffusers.py.
TRANSFORMER_NAMES = (
    (r"^token_refiner\.refiner_blocks\.", "token_refiner.blocks."),
    (r"^transformer_blocks\.", "blocks."),
    (r"\.attn\.to_out\.0\.", ".attn.out_proj."),
    (r"\.attn\.norm_([qk])\.", r".attn.\1_norm."),
    (r"\.ff\.net\.0\.proj\.", ".mlp.fc1."),
    (r"\.ff\.net\.2\.", ".mlp.fc2."),
    (r"^proj_in\.", "video_patch_proj."),
    (r"^audio_proj_in\.", "audio_patch_proj."),
    (r"^context_embedder\.", "condition_proj."),
    (r"^time_embedder\.linear_1\.", "time_embedder.proj_in."),
    (r"^time_embedder\.linear_2\.", "time_embedder.proj_out."),
    (r"^norm_out\.linear\.", "final_layer.adaln_proj.linear."),
    (r"^norm_out\.norm\.", "final_layer.norm."),
    (r"^proj_out\.", "final_layer.video_out."),
    (r"^audio_proj_out\.", "final_layer.audio_out."),
)
VAE_NAMES = (
    (r"\.proj_in\.", ".x_embedder."),
    (r"\.attn\.to_out\.0\.", ".attn.to_out."),
    (r"\.ff\.net\.0\.proj\.", ".ff.w1."),
    (r"\.ff\.net\.2\.", ".ff.w2."),
)
TEXT_NAMES = ((r"^model\.language_model\.", "model."),)
_PROJECTION = re.compile(r"\.attn\.to_([qkv])\.(weight|bias)$")

Weights = dict[str, mx.array]


def read_part(folder: Path, part: str) -> tuple[Weights, dict[str, Any]]:
    """Return a part's weights and configuration."""
    weights: Weights = {}
    for file in (folder / part).glob("*.safetensors"):
        weights |= mx.load(str(file))
    return weights, json.loads((folder / part / "config.json").read_text())


def rename(weights: Weights, names: tuple[tuple[str, str], ...]) -> Weights:
    """Return weights under other names."""
    for pattern, replacement in names:
        weights = {re.sub(pattern, replacement, name): value for name, value in weights.items()}
    return weights


def fuse(weights: Weights, name: str, heads: int | None) -> Weights:
    """Return weights with queries, keys and values in one matrix: all of each, or head by head."""
    groups: dict[str, dict[str, mx.array]] = {}
    fused = {}
    for key, value in weights.items():
        if match := _PROJECTION.search(key):
            groups.setdefault(f"{key[: match.start()]}.attn.{name}.{match[2]}", {})[match[1]] = value
        else:
            fused[key] = value
    for key, parts in groups.items():
        values = [parts[part] for part in "qkv"]
        if heads is not None:
            values = [mx.stack([part.reshape(heads, -1, *part.shape[1:]) for part in values], axis=1)]
        fused[key] = mx.concatenate(values).reshape(-1, *parts["q"].shape[1:])
    return fused


def swap_halves(weights: Weights, ending: str) -> Weights:
    """Return weights in which gates come before values."""
    return {
        name: mx.concatenate(mx.split(value, 2)[::-1]) if ending in name else value for name, value in weights.items()
    }


def load(model: Any, weights: Weights) -> Any:
    """Return a module with weights; those that it doesn't have are left out."""
    wanted = {name for name, _ in tree_flatten(model.parameters())}
    model.load_weights([(name, weights[name].astype(mx.float32)) for name in wanted])
    return model


def load_transformer(folder: Path) -> MiniMaxH3:
    """Return the transformer."""
    weights, config = read_part(folder, "transformer")
    settings = H3Config(
        hidden_size=config["hidden_size"],
        num_layers=config["num_layers"],
        token_refiner_num_layers=config["num_refiner_layers"],
        num_attention_heads=config["num_attention_heads"],
        attention_head_dim=config["attention_head_dim"],
        ffn_hidden_size=config["ffn_dim"],
        latents_dim=config["in_channels"],
        audio_latents_dim=config["audio_in_channels"],
        text_dim=config["text_dim"],
        timestep_input_dim=config["freq_dim"],
        time_embed_hidden_size=config["time_embed_hidden_dim"],
        time_embed_dim=config["time_embed_dim"],
        rope_inv_freq_len=config["rope_freq_dim"],
    )
    weights = swap_halves(rename(fuse(weights, "qkv_proj", None), TRANSFORMER_NAMES), ".mlp.fc1.")
    frequencies = config["rope_freq_dim"]
    weights["rope.inv_freq"] = 1.0 / config["rope_theta"] ** (mx.arange(frequencies, dtype=mx.float32) / frequencies)
    model: MiniMaxH3 = load(MiniMaxH3(settings), weights)
    return model


def load_text_encoder(folder: Path, layers: int) -> TextEncoder:
    """Return the first layers of the text encoder."""
    weights, config = read_part(folder, "text_encoder")
    text = config["text_config"]
    settings = TextEncoderConfig(
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        num_layers=layers,
        num_attention_heads=text["num_attention_heads"],
        num_key_value_heads=text["num_key_value_heads"],
        head_dim=text["head_dim"],
        rope_theta=text["rope_parameters"]["rope_theta"],
        mrope_sections=tuple(text["rope_parameters"]["mrope_section"]),
    )
    model: TextEncoder = load(TextEncoder(settings), rename(weights, TEXT_NAMES))
    return model


def load_video_vae(folder: Path) -> VideoVAE:
    """Return the decoder of pictures."""
    weights, config = read_part(folder, "vae")
    heads, width = config["decoder_num_attention_heads"], config["decoder_attention_head_dim"]
    settings = VideoVAEConfig(
        latent_channels=config["latent_channels"],
        hidden_size=heads * width,
        num_layers=config["decoder_num_layers"],
        num_attention_heads=heads,
        attention_head_dim=width,
        ffn_hidden_size=config["decoder_ffn_mult"] * heads * width,
        num_register_tokens=config["decoder_num_register_tokens"],
    )
    weights = swap_halves(rename(fuse(weights, "to_qkv", heads), VAE_NAMES), ".ff.w1.")
    weights["post_quant_conv.weight"] = weights["post_quant_conv.weight"].reshape(2 * [config["latent_channels"]])
    weights["decoder.mask_token"] = mx.zeros((1, 1, heads * width))
    model: VideoVAE = load(VideoVAE(settings), weights | read_statistics(config))
    return model


def load_audio_vae(folder: Path) -> AudioVAE:
    """Return the decoder of sound."""
    weights, config = read_part(folder, "audio_vae")
    settings = AudioVAEConfig(
        latent_channels=config["latent_channels"],
        latent_dim=config["latent_dim"],
        decoder_dim=config["decoder_dim"],
        upsample_rates=tuple(config["decoder_rates"]),
        upsample_kernels=tuple(config["decoder_kernel_sizes"]),
        resblock_kernels=tuple(config["resblock_kernel_sizes"]),
        resblock_dilations=tuple(map(tuple, config["resblock_dilation_sizes"])),
        sample_rate=config["sampling_rate"],
    )
    folded = {}
    for name, value in weights.items():
        if name.endswith(".weight_v"):  # Divided by its norm, and multiplied by a gain.
            axes = tuple(range(1, value.ndim))
            value = value / mx.sqrt((value**2).sum(axis=axes, keepdims=True)) * weights[name[:-1] + "g"]
            name = name.removesuffix("_v")
        if name.endswith(".weight") and value.ndim == 3:  # Channels are last in MLX.
            value = value.transpose(1, 2, 0) if ".ups." in name else value.transpose(0, 2, 1)
        folded[name] = value
    model: AudioVAE = load(AudioVAE(settings), folded | read_statistics(config))
    return model


def read_statistics(config: dict[str, Any]) -> Weights:
    """Return the mean and the standard deviation of latents."""
    return {name: mx.array(config[name]) for name in ("latents_mean", "latents_std")}


def make(case: dict[str, np.ndarray], parts: dict[str, nn.Module], steps: int) -> dict[str, np.ndarray]:
    """Return a prompt's states, the latents after all steps, and the video.

    Args:
        case: Tokens [L], noise of the video [1, C, T, H, W] and of the sound [1, C, 2, A].
        parts: The modules by name.
        steps: How many steps there are.
    """
    states = parts["text"](mx.array(case["ids"])[None])[0]
    transformer = parts["transformer"]
    refined, video, sound = transformer.refine_text(states), mx.array(case["video"]), mx.array(case["audio"])
    _, _, latent_frames, height, width = video.shape
    packed = layout.pack(
        text_len=len(states), latent_t=latent_frames, latent_h=height, latent_w=width, audio_t=sound.shape[3]
    )
    shifts = layout.SIGMA_SHIFT_VIDEO, layout.SIGMA_SHIFT_AUDIO
    levels = [[layout.time_shift_sigma(1 - step / steps, 1.0, shift) for step in range(steps + 1)] for shift in shifts]
    of_video, of_audio = (itertools.pairwise(values) for values in levels)
    for (now, following), (sound_now, sound_following) in zip(of_video, of_audio, strict=True):
        velocity, of_sound = transformer(video, sound, refined, packed, now, sigma_audio=sound_now)
        video = sampler.euler_step(video, velocity, now, following)
        sound = sampler.euler_step(sound, of_sound, sound_now, sound_following)
        mx.eval(video, sound)
    made = {
        "states": states,
        "video": video,
        "audio": sound,
        "pixels": parts["vae"](video),
        "sound": parts["audio_vae"](sound),
    }
    assert math.isfinite(float(made["pixels"].sum()))
    return {name: np.array(value) for name, value in made.items()}


def main() -> None:
    """Make the cases of a file, and write what was made of them."""
    folder, source, target, layers, steps = sys.argv[1:]
    mx.set_default_device(mx.cpu)
    parts = {
        "text": load_text_encoder(Path(folder), int(layers)),
        "transformer": load_transformer(Path(folder)),
        "vae": load_video_vae(Path(folder)),
        "audio_vae": load_audio_vae(Path(folder)),
    }
    given, results = np.load(source), dict[str, Any]()
    for name in dict.fromkeys(key.rpartition(" ")[0] for key in given.files):
        case = {part: given[f"{name} {part}"] for part in ("ids", "video", "audio")}
        results |= {f"{name} {part}": value for part, value in make(case, parts, int(steps)).items()}
    np.savez(target, **results)


if __name__ == "__main__":
    main()
