"""LTX-2's sound: latents to a mel spectrogram and that to samples, and a spectrogram to latents, always in float32.

The vocoder is written in JAX, of the parts in `families/shared/vocoder.py`; diffusers' module has the structure, the
parameters' names and their values. Each device computes a part of the samples.

Shapes: A latents of the sound, F mel frames, M mel bins, T rows of a signal, C channels.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from diffusers import AutoencoderKLLTX2Audio
from diffusers.pipelines.ltx2 import LTX2Vocoder, LTX2VocoderWithBWE
from jax.sharding import Mesh

from wan_tpu.errors import CheckpointError
from wan_tpu.families.ltx2.config import Ltx2Config
from wan_tpu.families.ltx2.vae import HALVES, STATISTICS
from wan_tpu.families.shared.flop_count import count
from wan_tpu.families.shared.layers import in_float32
from wan_tpu.families.shared.vocoder import (
    EXACT,
    RATIO,
    Convolution,
    Half,
    Snake,
    Weights,
    Window,
    activate_antialiased,
    convolve,
    convolve_transposed,
    raise_rate,
    run_blocks,
    share_signals,
)
from wan_tpu.families.shared.vocoder_sizes import SizeKeys, check_sizes, measure_reach
from wan_tpu.runtime.bridge import Params, call
from wan_tpu.runtime.components import Component
from wan_tpu.runtime.health import keep_inf
from wan_tpu.runtime.mesh import Rule

_REPLICATED = (Rule(r".*", ()),)  # The decoder has 32 M parameters, the vocoder 129 M: every device has them all.
_VOCODERS: dict[str, Any] = {"LTX2Vocoder": LTX2Vocoder, "LTX2VocoderWithBWE": LTX2VocoderWithBWE}
# The activations, and whether they are antialiased, that published vocoders have.
_ACTIVATIONS = {"snakebeta": True, "leaky_relu": False}
_FINAL: dict[str | None, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "clamp": lambda x: jnp.clip(x, -1, 1),
    None: lambda x: x,
}


def audio_half(config: Ltx2Config, dropped: str) -> Component:
    """Return the sound's VAE without the half named in `dropped`."""

    def adapt(module: torch.nn.Module, mesh: Mesh) -> None:
        delattr(module, dropped)

    return Component(
        folder="audio_vae",
        build=lambda: AutoencoderKLLTX2Audio.from_config(config.audio_vae),
        adapt=adapt,
        scanned=(),
        rules=_REPLICATED,
        float32=(*HALVES, *STATISTICS),
    )


def vocoder(config: Ltx2Config) -> Component:
    """Return the vocoder.

    Raises:
        CheckpointError: Its configuration asks for something that no published vocoder has.
    """
    settings = config.vocoder
    _check_vocoder(settings)
    kind = _VOCODERS[settings["_class_name"]]

    def adapt(module: torch.nn.Module, mesh: Mesh) -> None:
        module.mesh = mesh

    arguments = {key: value for key, value in settings.items() if not key.startswith("_")}
    return Component(
        folder="vocoder",
        build=lambda: kind.from_config(arguments),
        adapt=adapt,
        scanned=(),
        rules=_REPLICATED,
        float32=("conv_in", "upsamplers", "resnets", "act_out", "conv_out", "mel_stft"),
    )


def decode_mel(module: torch.nn.Module, params: Params, latents: jax.Array) -> jax.Array:
    """Decode normalised latents [1, A, C] as a spectrogram of two channels, float32 [1, 2, F, M]."""
    latents = latents.astype(jnp.float32) * params["latents_std"] + params["latents_mean"]
    channels = module.config["latent_channels"]
    unpacked = latents.reshape(*latents.shape[:2], channels, -1).transpose(0, 2, 1, 3)
    with in_float32():
        return call(module, params, lambda vae, z: vae.decoder(z), unpacked)


def encode_mel(module: torch.nn.Module, params: Params, mel: jax.Array) -> jax.Array:
    """Encode a spectrogram [1, 2, F, M] as the mean of its normalised latents, float32 [A, C]."""
    with in_float32():
        moments = call(module, params, lambda vae, x: vae.encoder(x), mel)
    mean = moments[0, : module.config["latent_channels"]].transpose(1, 0, 2)
    return (mean.reshape(len(mean), -1) - params["latents_mean"]) / params["latents_std"]


def vocode(module: torch.nn.Module, params: Params, mel: jax.Array) -> jax.Array:
    """Return the samples in [-1, 1], float32 [2, samples], of a spectrogram [1, 2, F, M]."""
    signal = mel[0].astype(jnp.float32).transpose(1, 0, 2).reshape(1, mel.shape[2], -1)
    run = functools.partial(_vocode_part, module)
    return share_signals(run, params, signal, _reach(module), module.mesh)[0].T


def count_flops(config: Ltx2Config, latents: int) -> int:
    """Count the operations of decoding sound (a multiply-add is two) on diffusers' own modules."""
    audio = config.audio_vae
    bins = audio["mel_bins"] // 4
    decoding = count(
        audio_half(config, "encoder").build,
        lambda module: module.decode(torch.empty(1, audio["latent_channels"], latents, bins, device="meta")),
    )
    mel = torch.empty(1, 2, 4 * latents - 3, audio["mel_bins"], device="meta")
    return decoding + count(vocoder(config).build, lambda module: module(mel))


def _vocode_part(module: Any, params: Params, mel: jax.Array, window: Window) -> jax.Array:
    """Return the samples [T, 2] of a part of a spectrogram [F, 2 M]."""
    if isinstance(module, LTX2Vocoder):
        return _generate(module, Weights(params, ""), mel, window)
    samples = _generate(module.vocoder, Weights(params, "vocoder."), mel, window)
    window = window.times(module.vocoder.total_upsample_factor)
    again = _make_mel(module.config, Weights(params, "mel_stft."), samples, window)
    hop = module.config["hop_length"]
    frames = Window(window.first // hop, window.total // hop)
    details = _generate(module.bwe_generator, Weights(params, "bwe_generator."), again, frames)
    resampler = module.resampler
    start = resampler.pad_left - resampler.ratio * resampler.pad
    phases = raise_rate(samples, window, params["resampler.filter"][0, 0], resampler.ratio, start)
    smooth = jnp.stack(phases, axis=1).reshape(details.shape)
    return keep_inf(_FINAL["clamp"], details + smooth)


def _generate(vocoder: Any, weights: Weights, x: jax.Array, window: Window) -> jax.Array:
    """Return a vocoder's samples [T, 2] of a spectrogram [F, 2 M]."""
    settings = vocoder.config
    slope, count = settings["leaky_relu_negative_slope"], len(settings["resnet_kernel_sizes"])

    def activate(snake: Snake | None, x: jax.Array, window: Window) -> jax.Array:
        return jax.nn.leaky_relu(x, slope) if snake is None else activate_antialiased(snake, x, window)

    x = convolve(_read_convolution(weights.part("conv_in")), x, window)
    for stage, stride in enumerate(settings["upsample_factors"]):
        if settings["act_fn"] == "leaky_relu":
            x = jax.nn.leaky_relu(x, slope)
        x = convolve_transposed(_read_convolution(weights.part(f"upsamplers.{stage}")), x, window, stride)
        window = window.times(stride)
        blocks = [weights.part(f"resnets.{stage * count + i}") for i in range(count)]
        layers = len(settings["resnet_dilations"][0])
        halves = [[[_read_half(block, f"{half}.{i}") for half in "12"] for i in range(layers)] for block in blocks]
        x = run_blocks(halves, activate, x, window, settings["resnet_dilations"])
    snake = _read_snake(weights.part("act_out"))
    # The slope of the last one isn't a setting.
    x = jax.nn.leaky_relu(x, 0.01) if snake is None else activate_antialiased(snake, x, window)
    samples = convolve(_read_convolution(weights.part("conv_out")), x, window)
    return keep_inf(_FINAL[settings["final_act_fn"]], samples)


def _read_half(block: Weights, name: str) -> Half:
    return _read_convolution(block.part(f"convs{name}")), _read_snake(block.part(f"acts{name}"))


def _read_convolution(weights: Weights) -> Convolution:
    return Convolution(weights["weight"], weights.get("bias"))


def _read_snake(weights: Weights) -> Snake | None:
    """Return the weights of an antialiased activation; None if there are none."""
    if weights.get("act.alpha") is None:
        return None
    up, down = weights["upsample.filter"][0, 0], weights["downsample.filter"][0, 0]
    return Snake(weights["act.alpha"], weights["act.beta"], up, down)


def _make_mel(settings: Any, weights: Weights, samples: jax.Array, window: Window) -> jax.Array:
    """Return the logarithmic mel spectrogram [F, 2 M] of samples [T, 2]; a frame ends where its hop does."""
    hop, length = settings["hop_length"], settings["filter_length"]
    frames, hops = len(samples) // hop, -(-length // hop)
    # A frame's last samples are those of its hop, so it begins with the last ones of a hop before.
    samples = window.silence_outside(samples)
    blocks = jnp.pad(samples, ((hop * (hops - 1), 0), (0, 0))).T.reshape(2, -1, hop)
    windows = jnp.concatenate([blocks[:, i : i + frames] for i in range(hops)], axis=2)[:, :, -length:]
    spectrum = jnp.einsum("cfk,sk->cfs", windows, weights["stft_fn.forward_basis"][:, 0], precision=EXACT)
    real, imaginary = jnp.split(spectrum, 2, axis=2)
    magnitude = jnp.sqrt(jnp.square(real) + jnp.square(imaginary))
    mel = jnp.einsum("cfs,ms->fcm", magnitude, weights["mel_basis"], precision=EXACT)
    return jnp.log(jnp.maximum(mel, 1e-5)).reshape(frames, -1)


def _reach(module: Any) -> int:
    """Return the largest number of mel frames on each side that a frame's samples depend on."""
    if isinstance(module, LTX2Vocoder):
        return math.ceil(_reach_of_one(module.config, ""))
    settings = module.config
    hops = math.ceil(settings["filter_length"] / settings["hop_length"]) + _reach_of_one(settings, "bwe_")
    first = math.prod(settings["upsample_factors"])
    resampling = module.resampler.kernel_size / module.resampler.ratio / first
    return math.ceil(_reach_of_one(settings, "") + max(hops * settings["hop_length"] / first, resampling))


def _reach_of_one(settings: Any, prefix: str) -> float:
    """Return the same for one vocoder, in its own frames."""
    filter_taps = settings[f"{prefix}antialias_kernel_size"] if settings[f"{prefix}antialias"] else 0
    return measure_reach(settings, _name_sizes(prefix), filter_taps)


def _name_sizes(prefix: str) -> SizeKeys:
    names = ("resnet_kernel_sizes", "resnet_dilations", "upsample_factors", "upsample_kernel_sizes")
    return SizeKeys(*(prefix + name for name in names))


def _check_vocoder(settings: dict[str, Any]) -> None:
    has_extension = settings["_class_name"] == "LTX2VocoderWithBWE"
    for prefix in ("", "bwe_") if has_extension else ("",):
        check_sizes("vocoder/config.json", settings, _name_sizes(prefix))
        kind, antialiased = settings[f"{prefix}act_fn"], settings[f"{prefix}antialias"]
        if _ACTIVATIONS.get(kind) != antialiased:
            raise CheckpointError(
                f"vocoder/config.json has {prefix}act_fn {kind!r} with {prefix}antialias {antialiased}; supported: "
                "'snakebeta' with antialias and 'leaky_relu' without"
            )
        if (ratio := settings[f"{prefix}antialias_ratio"]) != RATIO:
            raise CheckpointError(f"vocoder/config.json has {prefix}antialias_ratio {ratio}; supported: {RATIO}")
        if (final := settings[f"{prefix}final_act_fn"]) not in _FINAL:
            raise CheckpointError(
                f"vocoder/config.json has {prefix}final_act_fn {final!r}; supported: tanh, clamp and null"
            )
    if has_extension:
        _check_extension(settings)


def _check_extension(settings: dict[str, Any]) -> None:
    hop, rates = settings["hop_length"], (settings["input_sampling_rate"], settings["output_sampling_rate"])
    if settings["filter_length"] != settings["window_length"]:
        raise CheckpointError(
            f"vocoder/config.json has filter_length {settings['filter_length']} and window_length "
            f"{settings['window_length']}; supported: equal lengths"
        )
    if math.prod(settings["upsample_factors"]) % hop or rates[1] % rates[0]:
        raise CheckpointError(
            f"vocoder/config.json has hop_length {hop} and rates {rates[0]} and {rates[1]}; each mel frame must be "
            "a whole number of hops, and one rate a multiple of the other"
        )
    if math.prod(settings["bwe_upsample_factors"]) * rates[0] != hop * rates[1]:
        raise CheckpointError(
            f"vocoder/config.json has bwe_upsample_factors {settings['bwe_upsample_factors']}; their product must "
            f"be {hop * rates[1] // rates[0]}, the samples of a hop"
        )
