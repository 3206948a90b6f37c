"""MiniMax-H3's sound: normalised latents to samples, and back, each channel by itself, always in float32.

The decoder is a BigVGAN, written in JAX of the parts in `families/shared/vocoder.py`; diffusers' module has the
structure, the parameters' names and their values. Its convolutions have weight norm, which is applied to what they
compute. Each device computes a part of one channel's samples.

Shapes: A latents of one channel, T rows of a signal, C channels of a signal.
"""

import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import AutoencoderKLMiniMaxH3Audio
from jax.sharding import Mesh

from wan_tpu.errors import CheckpointError
from wan_tpu.families.minimax_h3.config import MiniMaxH3Config
from wan_tpu.families.shared.flop_count import count
from wan_tpu.families.shared.layers import in_float32
from wan_tpu.families.shared.vocoder import (
    EXACT,
    Convolution,
    Half,
    Snake,
    Weights,
    Window,
    activate_antialiased,
    convolve,
    convolve_transposed,
    run_blocks,
    share_signals,
)
from wan_tpu.families.shared.vocoder_sizes import SizeKeys, check_sizes, measure_reach
from wan_tpu.runtime.bridge import Params, call, to_jax, to_torch
from wan_tpu.runtime.components import Component
from wan_tpu.runtime.health import keep_inf
from wan_tpu.runtime.mesh import Rule

_CHANNELS = 2  # Stereo: the model decodes one channel at a time.
_CHANNELS_FIRST = ("NCH", "OIH", "NCH")
_FILTER_TAPS = 12  # Of the filters around an activation, which isn't a setting.
_ENCODER = ("encoder", "pre_block", "mean_proj", "logs_proj")
_SIZES = SizeKeys("resblock_kernel_sizes", "resblock_dilation_sizes", "decoder_rates", "decoder_kernel_sizes")


def audio_decoder(config: MiniMaxH3Config) -> Component:
    """Return the sound's VAE, without its encoder.

    Raises:
        CheckpointError: It computes what no published one does.
    """
    settings = config.audio_vae
    check_sizes("audio_vae/config.json", settings, _SIZES)
    for key in ("latents_mean", "latents_std"):
        if len(settings[key] or ()) != settings["latent_channels"]:
            raise CheckpointError(
                f"audio_vae/config.json has {key} {settings[key]}; it needs a number for each of the "
                f"{settings['latent_channels']} latent channels"
            )

    def adapt(module: torch.nn.Module, mesh: Mesh) -> None:
        for part in _ENCODER:
            delattr(module, part)
        module.mesh = mesh

    return Component(
        folder="audio_vae",
        build=functools.partial(_build, settings),
        adapt=adapt,
        scanned=(),
        rules=(Rule(r".*", ()),),  # Every device has all of its 65 M parameters.
        float32=("decoder", "dec_in_proj"),
    )


def audio_encoder(config: MiniMaxH3Config) -> Component:
    """Return the sound's VAE, with what computes the mean of its latents; raises `CheckpointError` as above."""
    settings = config.audio_vae
    width, channels = settings["latent_dim"] // settings["num_attention_heads"], settings["latent_channels"]
    if width % channels:
        raise CheckpointError(
            f"audio_vae/config.json has heads of {width} channels, which aren't a multiple of the {channels} of latents"
        )

    def adapt(module: torch.nn.Module, mesh: Mesh) -> None:
        for part in ("decoder", "dec_in_proj", "logs_proj"):
            delattr(module, part)
        module.pre_block.attn.forward = functools.partial(_attend, module.pre_block.attn)
        for part in module.modules():
            if hasattr(part, "weight_g"):
                part._forward_pre_hooks.clear()  # They would put a traced weight into the module.
                part.forward = functools.partial(_convolve_normed, part)

    return Component(
        folder="audio_vae",
        build=functools.partial(_build, settings),
        adapt=adapt,
        scanned=(),
        rules=(Rule(r".*", ()),),
        float32=_ENCODER,
    )


def encode(module: torch.nn.Module, params: Params, samples: jax.Array) -> jax.Array:
    """Encode samples of both channels, float32 [2, samples], as normalised latents [2A, C], one channel first."""
    settings: Any = module.config
    mean, std = (np.array(settings[key], np.float32) for key in ("latents_mean", "latents_std"))

    def run(module: Any, samples: torch.Tensor) -> torch.Tensor:
        hidden_states = module.encoder(samples[:, None]).transpose(1, 2)
        return module.mean_proj(module.pre_block(hidden_states).transpose(1, 2)).transpose(1, 2)

    with in_float32():
        latents: jax.Array = call(module, params, run, samples)
    return ((latents - mean) / std).reshape(-1, latents.shape[2])


def _convolve_normed(conv: Any, x: torch.Tensor) -> torch.Tensor:
    weight, scale = to_jax(conv.weight_v), to_jax(conv.weight_g)
    normed = weight * (scale / jnp.sqrt(jnp.square(weight).sum((1, 2), keepdims=True)))
    output = jax.lax.conv_general_dilated(
        to_jax(x),
        normed,
        conv.stride,
        [conv.padding * 2],
        rhs_dilation=conv.dilation,
        dimension_numbers=_CHANNELS_FIRST,
    )
    return to_torch(output + to_jax(conv.bias)[:, None])


def _attend(attention: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Compute a causal attention's output, [2, A, C], the mean of its heads and of neighbouring channels."""
    bias = torch.cat((attention.q_bias, attention.zero_k_bias, attention.v_bias))
    projected = to_jax(torch.nn.functional.linear(hidden_states, attention.qkv.weight, bias))
    query, key, value = jnp.moveaxis(projected.reshape(*projected.shape[:2], 3, attention.num_heads, -1), 2, 0)
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True).mean(2)
    pooled = attended.reshape(*attended.shape[:2], attention.out_dim, -1).mean(3)
    return attention.proj(to_torch(pooled))


def decode(module: torch.nn.Module, params: Params, latents: jax.Array) -> jax.Array:
    """Decode normalised latents [1, 2A, C], one channel's after the other's, as samples, float32 [2, samples]."""
    settings: Any = module.config
    mean, std = (np.array(settings[key], np.float32) for key in ("latents_mean", "latents_std"))
    signals = latents.astype(jnp.float32).reshape(_CHANNELS, -1, latents.shape[2]) * std + mean
    reach = math.ceil(measure_reach(settings, _SIZES, _FILTER_TAPS))
    run = functools.partial(_decode_part, settings)
    return share_signals(run, params, signals, reach, module.mesh)[:, :, 0]


def count_flops(config: MiniMaxH3Config, rows: int) -> int:
    """Count the operations of decoding 2A rows of latents (a multiply-add is two) on diffusers' own module."""
    shape = _CHANNELS, config.audio_vae["latent_channels"], rows // _CHANNELS
    return count(audio_decoder(config).build, lambda module: module.decode(torch.empty(shape, device="meta")))


def count_encoding(config: MiniMaxH3Config, samples: int) -> int:
    """Count the operations of encoding that many samples of both channels on diffusers' own module."""
    sound = torch.empty(_CHANNELS, 1, samples, device="meta")
    return count(audio_encoder(config).build, lambda module: module.encode(sound))


def _build(settings: dict[str, Any]) -> torch.nn.Module:
    with warnings.catch_warnings():
        # The names of the checkpoint's weights are those of torch's older weight norm.
        warnings.filterwarnings("ignore", ".*weight_norm.* is deprecated", FutureWarning)
        return AutoencoderKLMiniMaxH3Audio.from_config(settings)


def _decode_part(settings: Any, params: Params, x: jax.Array, window: Window) -> jax.Array:
    """Return the samples [T, 1] of a part of one channel's latents [A, C]."""
    weights = Weights(params, "decoder.")
    project = Weights(params, "dec_in_proj.")
    x = jnp.dot(x, project["weight"][:, :, 0].T, precision=EXACT) + project["bias"]
    x = convolve(_read_convolution(weights.part("conv_pre")), x, window)
    dilations = settings["resblock_dilation_sizes"]
    for stage, stride in enumerate(settings["decoder_rates"]):
        x = convolve_transposed(_read_convolution(weights.part(f"ups.{stage}.0")), x, window, stride)
        window = window.times(stride)
        blocks = [weights.part(f"resblocks.{stage * len(dilations) + i}") for i in range(len(dilations))]
        halves = [[_read_layer(block, layer) for layer in range(len(dilations[0]))] for block in blocks]
        x = run_blocks(halves, _activate, x, window, dilations)
    x = _activate(_read_snake(weights.part("activation_post")), x, window)
    samples = convolve(_read_convolution(weights.part("conv_post")), x, window)
    return keep_inf(lambda x: jnp.clip(x, -1, 1), samples)


def _activate(snake: Snake | None, x: jax.Array, window: Window) -> jax.Array:
    assert snake is not None
    return activate_antialiased(snake, x, window)


def _read_layer(block: Weights, layer: int) -> list[Half]:
    """Return the two halves of a residual block's layer, whose activations are in one list."""
    return [
        (
            _read_convolution(block.part(f"convs{half + 1}.{layer}")),
            _read_snake(block.part(f"activations.{2 * layer + half}")),
        )
        for half in range(2)
    ]


def _read_convolution(weights: Weights) -> Convolution:
    return Convolution(weights["weight_v"], weights.get("bias"), weights["weight_g"])


def _read_snake(weights: Weights) -> Snake:
    up, down = weights["upsample.filter"][0, 0], weights["downsample.lowpass.filter"][0, 0]
    return Snake(weights["act.alpha"], weights["act.beta"], up, down)
