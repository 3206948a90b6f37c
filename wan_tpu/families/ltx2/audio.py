"""Decodes LTX-2's sound: latents to a mel spectrogram, and that to samples, always in float32.

The vocoder is written in JAX, with time first and channels last: torch's signals of few channels suit a TPU badly, and
its antialiased activations, which double a signal's rate and halve it again, need no array of the doubled rate here.
diffusers' module has the structure, the parameters' names and their values. Each device computes a part of the samples,
from its mel frames and all that reach it: nothing is exchanged before the end.

Shapes: A latents of the sound, F mel frames, M mel bins, T rows of a signal, C channels, K taps of a filter.
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from diffusers import AutoencoderKLLTX2Audio
from diffusers.pipelines.ltx2 import LTX2Vocoder, LTX2VocoderWithBWE
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from wan_tpu.errors import CheckpointError
from wan_tpu.families.ltx2.config import Ltx2Config
from wan_tpu.families.shared.flop_count import count
from wan_tpu.runtime.bridge import Params, call
from wan_tpu.runtime.components import Component
from wan_tpu.runtime.mesh import Rule

_WHOLE = (Rule(r".*", ()),)  # The decoder has 32 M parameters, the vocoder 129 M: every device has them all.
_EXACT = jax.lax.Precision.HIGHEST
_RATIO = 2  # How many times the rate of a signal an activation has.
_VOCODERS: dict[str, Any] = {"LTX2Vocoder": LTX2Vocoder, "LTX2VocoderWithBWE": LTX2VocoderWithBWE}
# The activations, and whether they are antialiased, that published vocoders have.
_ACTIVATIONS = {"snakebeta": True, "leaky_relu": False}
_OF_ACTIVATION = ("act.alpha", "act.beta", "upsample.filter", "downsample.filter")
_FINAL: dict[str | None, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "clamp": lambda x: jnp.clip(x, -1, 1),
    None: lambda x: x,
}


def audio_decoder(config: Ltx2Config) -> Component:
    """Return the sound's VAE, without its encoder."""

    def adapt(module: torch.nn.Module, mesh: Mesh) -> None:
        del module.encoder

    return Component(
        folder="audio_vae",
        build=lambda: AutoencoderKLLTX2Audio.from_config(config.audio_vae),
        adapt=adapt,
        scanned=(),
        rules=_WHOLE,
        float32=("decoder", "latents_mean", "latents_std"),
    )


def vocoder(config: Ltx2Config) -> Component:
    """Return the vocoder.

    Raises:
        CheckpointError: It computes what no published one does.
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
        rules=_WHOLE,
        float32=("conv_in", "upsamplers", "resnets", "act_out", "conv_out", "mel_stft"),
    )


def decode_mel(module: torch.nn.Module, params: Params, latents: jax.Array) -> jax.Array:
    """Decode normalised latents [1, A, C] as a spectrogram of two channels, float32 [1, 2, F, M]."""
    latents = latents.astype(jnp.float32) * params["latents_std"] + params["latents_mean"]
    channels = module.config["latent_channels"]
    unpacked = latents.reshape(*latents.shape[:2], channels, -1).transpose(0, 2, 1, 3)
    with jax.default_matmul_precision("highest"):
        return call(module, params, lambda vae, z: vae.decoder(z), unpacked)


def vocode(module: torch.nn.Module, params: Params, mel: jax.Array) -> jax.Array:
    """Return the samples in [-1, 1], float32 [2, samples], of a spectrogram [1, 2, F, M]."""
    mel, mesh = mel[0].astype(jnp.float32), module.mesh
    frames, reach = mel.shape[1], _reach(module)
    own = -(-frames // mesh.size)
    if own + 2 * reach >= frames:
        return _vocode_part(module, params, mel, _Window(0, frames)).T

    def run(params: Params, mel: jax.Array) -> jax.Array:
        start = jax.lax.axis_index(mesh.axis_names) * own
        part = jax.lax.dynamic_slice_in_dim(mel, start, own + 2 * reach, axis=1)
        samples = _vocode_part(module, params, part, _Window(start - reach, frames))
        per_frame = len(samples) // part.shape[1]
        return samples[reach * per_frame : (reach + own) * per_frame]

    padded = jnp.pad(mel, ((0, 0), (reach, own * mesh.size - frames + reach), (0, 0)))
    parts = jax.shard_map(run, mesh=mesh, in_specs=(P(), P()), out_specs=P(mesh.axis_names), check_vma=False)
    samples = parts(params, padded)
    return samples[: len(samples) // (own * mesh.size) * frames].T


def count_flops(config: Ltx2Config, latents: int) -> int:
    """Count the operations of decoding sound (a multiply-add is two) on diffusers' own modules."""
    audio = config.audio_vae
    bins = audio["mel_bins"] // 4
    decoding = count(
        audio_decoder(config).build,
        lambda module: module.decode(torch.empty(1, audio["latent_channels"], latents, bins, device="meta")),
    )
    mel = torch.empty(1, 2, 4 * latents - 3, audio["mel_bins"], device="meta")
    return decoding + count(vocoder(config).build, lambda module: module(mel))


class _Weights:
    """The weights of one part of a module."""

    def __init__(self, params: Params, prefix: str) -> None:
        self._params, self._prefix = params, prefix

    def __getitem__(self, name: str) -> jax.Array:
        return self._params[self._prefix + name]

    def get(self, name: str) -> jax.Array | None:
        return self._params.get(self._prefix + name)

    def part(self, name: str) -> "_Weights":
        return _Weights(self._params, f"{self._prefix}{name}.")


@dataclass(frozen=True)
class _Window:
    """Which rows of a signal an array [T, C] has. What it has before and after the signal means nothing.

    Attributes:
        first: The number of its first row; negative before the signal.
        total: The signal's rows.
    """

    first: jax.Array | int
    total: int

    def times(self, ratio: int) -> "_Window":
        """Return the window at another rate."""
        return _Window(self.first * ratio, self.total * ratio)

    def silence_outside(self, x: jax.Array) -> jax.Array:
        """Return an array with zeros before and after the signal."""
        if self._is_whole(x):
            return x
        rows = self._rows(x)
        return jnp.where((rows >= 0) & (rows < self.total), x, 0)

    def repeat_ends(self, x: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
        """Return an array with the first row of one before the signal, and the last of another after it."""
        if self._is_whole(x):
            return x
        rows = self._rows(x)
        return jnp.where(
            rows < 0, self._row(first, 0), jnp.where(rows >= self.total, self._row(last, self.total - 1), x)
        )

    def _is_whole(self, x: jax.Array) -> bool:
        return isinstance(self.first, int) and len(x) == self.total

    def _rows(self, x: jax.Array) -> jax.Array:
        return (self.first + jnp.arange(len(x)))[:, None]

    def _row(self, x: jax.Array, number: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, jnp.clip(number - self.first, 0, len(x) - 1), 1)


def _vocode_part(module: Any, params: Params, mel: jax.Array, window: _Window) -> jax.Array:
    """Return the samples [T, 2] of a part of a spectrogram [2, F, M]."""
    if isinstance(module, LTX2Vocoder):
        return _generate(module, _Weights(params, ""), mel, window)
    samples = _generate(module.vocoder, _Weights(params, "vocoder."), mel, window)
    window = window.times(module.vocoder.total_upsample_factor)
    again = _make_mel(module.config, _Weights(params, "mel_stft."), samples, window)
    hop = module.config["hop_length"]
    frames = _Window(window.first // hop, window.total // hop)
    details = _generate(module.bwe_generator, _Weights(params, "bwe_generator."), again, frames)
    resampler = module.resampler
    start = resampler.pad_left - resampler.ratio * resampler.pad
    phases = _raise_rate(samples, window, params["resampler.filter"][0, 0], resampler.ratio, start)
    smooth = jnp.stack(phases, axis=1).reshape(details.shape)
    return jnp.clip(details + smooth, -1, 1)


def _generate(vocoder: Any, weights: _Weights, mel: jax.Array, window: _Window) -> jax.Array:
    """Return a vocoder's samples [T, 2] of a spectrogram [2, F, M]."""
    settings = vocoder.config
    slope, count = settings["leaky_relu_negative_slope"], len(settings["resnet_kernel_sizes"])
    x = _convolve(weights.part("conv_in"), mel.transpose(1, 0, 2).reshape(mel.shape[1], -1), window)
    for stage, stride in enumerate(settings["upsample_factors"]):
        if settings["act_fn"] == "leaky_relu":
            x = jax.nn.leaky_relu(x, slope)
        x = _convolve_transposed(weights.part(f"upsamplers.{stage}"), x, window, stride)
        window = window.times(stride)
        blocks = [weights.part(f"resnets.{stage * count + i}") for i in range(count)]
        x = _run_blocks(blocks, x, window, settings["resnet_dilations"], slope)
    # The slope of the last one isn't a setting.
    x = _convolve(weights.part("conv_out"), _activate(weights.part("act_out"), x, window, 0.01), window)
    return _FINAL[settings["final_act_fn"]](x)


def _run_blocks(
    blocks: list[_Weights], x: jax.Array, window: _Window, dilations: list[list[int]], slope: float
) -> jax.Array:
    """Return the mean of what residual blocks make of a signal [T, C].

    Loops run all blocks, their layers, a layer's two halves and a convolution's taps, so that each is compiled once:
    unrolled, the published vocoder would keep a TPU's compiler busy for over ten minutes. Convolutions of fewer taps
    than the longest have zeros around theirs.
    """
    taps = max(block["convs1.0.weight"].shape[2] for block in blocks)
    farthest = max(max(row) for row in dilations) * (taps // 2)
    halves = [
        [_stack([_read_half(block, f"{half}.{i}", taps) for half in ("1", "2")]) for i in range(len(row))]
        for block, row in zip(blocks, dilations, strict=True)
    ]
    stacked = _stack([_stack(row) for row in halves])

    def run_half(x: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
        half, dilation = inputs
        x = _activate(_Weights(half["act"], ""), x, window, slope)
        around = jnp.pad(window.silence_outside(x), ((farthest, farthest), (0, 0)))

        def add_tap(total: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
            tap, matrix = inputs
            rows = jax.lax.dynamic_slice_in_dim(around, farthest + (tap - taps // 2) * dilation, len(x))
            return total + jnp.dot(rows, matrix, precision=_EXACT), None

        start = jnp.broadcast_to(half["bias"], x.shape)
        return jax.lax.scan(add_tap, start, (jnp.arange(taps), half["matrices"]))[0], None

    def run_layer(x: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
        return x + jax.lax.scan(run_half, x, inputs)[0], None

    def run_block(total: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
        return total + jax.lax.scan(run_layer, x, inputs)[0], None

    spread = jnp.array([[(dilation, 1) for dilation in row] for row in dilations])
    return jax.lax.scan(run_block, jnp.zeros_like(x), (stacked, spread))[0] / len(blocks)


def _read_half(block: _Weights, half: str, taps: int) -> dict[str, Any]:
    """Return the weights of half of a residual block's layer; of its convolution a matrix [C, O] for each tap."""
    weight = block[f"convs{half}.weight"]  # [O, C, K]
    missing = taps - weight.shape[2]
    longer = jnp.pad(weight, ((0, 0), (0, 0), (missing // 2, missing - missing // 2)))
    activation = {name: block.get(f"acts{half}.{name}") for name in _OF_ACTIVATION}
    return {
        "matrices": longer.transpose(2, 1, 0),
        "bias": block[f"convs{half}.bias"],
        "act": {name: value for name, value in activation.items() if value is not None},
    }


def _stack(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _activate(weights: _Weights, x: jax.Array, window: _Window, slope: float) -> jax.Array:
    """Activate a signal [T, C]: antialiased snakes if it has weights, else a leaky ReLU."""
    if weights.get("act.alpha") is None:
        return jax.nn.leaky_relu(x, slope)
    frequency, amplitude = jnp.exp(weights["act.alpha"]), 1 / (jnp.exp(weights["act.beta"]) + 1e-9)
    up, down = weights["upsample.filter"][0, 0], weights["downsample.filter"][0, 0]
    phases = _raise_rate(x, window, up, _RATIO, len(up) // 2 - 1)
    phases = [phase + amplitude * jnp.square(jnp.sin(phase * frequency)) for phase in phases]
    return _lower_rate(phases, window, down)


def _raise_rate(x: jax.Array, window: _Window, taps: jax.Array, ratio: int, start: int) -> list[jax.Array]:
    """Return a signal [T, C] at `ratio` times its rate, as that many phases [T, C].

    Row m of the result is the sum over n of ratio x[n] taps[m + start - ratio n]; ends are repeated.
    """
    terms: list[list[tuple[int, int]]] = [[] for _ in range(ratio)]  # Taps and shifts of each phase.
    for phase in range(ratio):
        for tap in range(len(taps)):
            shift, rest = divmod(phase + start - tap, ratio)
            if rest == 0:
                terms[phase].append((tap, shift))
    shifted = _shift([x], window, {shift for phase in terms for _, shift in phase})[0]
    return [ratio * _add([taps[tap] * shifted[shift] for tap, shift in phase]) for phase in terms]


def _lower_rate(phases: list[jax.Array], window: _Window, taps: jax.Array) -> jax.Array:
    """Filter a signal given by phases [T, C], and return it at the rate of one phase, [T, C]; ends are repeated."""
    ratio, before = len(phases), len(taps) // 2 + len(taps) % 2 - 1
    places = [divmod(tap - before, ratio) for tap in range(len(taps))]
    shifted = _shift(phases, window, {shift for shift, _ in places})
    return _add([taps[tap] * shifted[phase][shift] for tap, (shift, phase) in enumerate(places)])


def _add(terms: list[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, terms)


def _shift(phases: list[jax.Array], window: _Window, shifts: set[int]) -> list[dict[int, jax.Array]]:
    """Return each phase [T, C] moved by each shift: row t is row t + shift; the ends of the signal are repeated."""
    rows, before, after = len(phases[0]), max(0, -min(shifts)), max(0, max(shifts))
    phases = [window.repeat_ends(phase, phases[0], phases[-1]) for phase in phases]
    first, last = phases[0][:1], phases[-1][-1:]
    moved = []
    for phase in phases:
        longer = jnp.concatenate([jnp.repeat(first, before, 0), phase, jnp.repeat(last, after, 0)])
        moved.append({shift: longer[before + shift : before + shift + rows] for shift in shifts})
    return moved


def _convolve(weights: _Weights, x: jax.Array, window: _Window) -> jax.Array:
    """Convolve a signal [T, C] with zeros around it, keeping its length."""
    weight, bias = weights["weight"], weights.get("bias")
    around = weight.shape[2] - 1
    y = jax.lax.conv_general_dilated(
        window.silence_outside(x)[None],
        weight,
        window_strides=(1,),
        padding=[(around // 2, around - around // 2)],
        dimension_numbers=("NWC", "OIW", "NWC"),
        precision=_EXACT,
    )[0]
    return y if bias is None else y + bias


def _convolve_transposed(weights: _Weights, x: jax.Array, window: _Window, stride: int) -> jax.Array:
    """Return a signal [T, C] at `stride` times its rate, as torch's ConvTranspose1d computes it."""
    weight = weights["weight"]  # [I, O, K]
    taps = weight.shape[2]
    around = taps - 1 - (taps - stride) // 2
    y = jax.lax.conv_general_dilated(
        window.silence_outside(x)[None],
        weight[:, :, ::-1],
        window_strides=(1,),
        padding=[(around, around)],
        lhs_dilation=(stride,),
        dimension_numbers=("NWC", "IOW", "NWC"),
        precision=_EXACT,
    )[0]
    return y + weights["bias"]


def _make_mel(settings: Any, weights: _Weights, samples: jax.Array, window: _Window) -> jax.Array:
    """Return the logarithmic mel spectrogram [2, F, M] of samples [T, 2]; a frame ends where its hop does."""
    hop, length = settings["hop_length"], settings["filter_length"]
    frames, hops = len(samples) // hop, -(-length // hop)
    # A frame's last samples are those of its hop, so it begins with the last ones of a hop before.
    samples = window.silence_outside(samples)
    blocks = jnp.pad(samples, ((hop * (hops - 1), 0), (0, 0))).T.reshape(2, -1, hop)
    windows = jnp.concatenate([blocks[:, i : i + frames] for i in range(hops)], axis=2)[:, :, -length:]
    spectrum = jnp.einsum("cfk,sk->cfs", windows, weights["stft_fn.forward_basis"][:, 0], precision=_EXACT)
    real, imaginary = jnp.split(spectrum, 2, axis=2)
    magnitude = jnp.sqrt(jnp.square(real) + jnp.square(imaginary))
    mel = jnp.einsum("cfs,ms->cfm", magnitude, weights["mel_basis"], precision=_EXACT)
    return jnp.log(jnp.maximum(mel, 1e-5))


def _reach(module: Any) -> int:
    """Return from how many mel frames on each side samples depend on a frame, at most."""
    if isinstance(module, LTX2Vocoder):
        return math.ceil(_reach_of_one(module.config, ""))
    settings = module.config
    hops = math.ceil(settings["filter_length"] / settings["hop_length"]) + _reach_of_one(settings, "bwe_")
    first = math.prod(settings["upsample_factors"])
    resampling = module.resampler.kernel_size / module.resampler.ratio / first
    return math.ceil(_reach_of_one(settings, "") + max(hops * settings["hop_length"] / first, resampling))


def _reach_of_one(settings: Any, prefix: str) -> float:
    """Return the same of one vocoder, in frames of its own."""
    activation = settings[f"{prefix}antialias_kernel_size"] // 2 if settings[f"{prefix}antialias"] else 0
    sizes = zip(settings[f"{prefix}resnet_kernel_sizes"], settings[f"{prefix}resnet_dilations"], strict=True)
    block = max(sum((taps // 2) * (1 + d) + 2 * activation for d in dilations) for taps, dilations in sizes)
    rate, reach = 1, 3.0  # The first convolution has seven taps, as the last one.
    stages = zip(settings[f"{prefix}upsample_kernel_sizes"], settings[f"{prefix}upsample_factors"], strict=True)
    for taps, factor in stages:
        reach += taps / factor / rate
        rate *= factor
        reach += block / rate
    return reach + (activation + 3) / rate


def _check_vocoder(settings: dict[str, Any]) -> None:
    extended = settings["_class_name"] == "LTX2VocoderWithBWE"
    for prefix in ("", "bwe_") if extended else ("",):
        dilations, taps = settings[f"{prefix}resnet_dilations"], settings[f"{prefix}resnet_kernel_sizes"]
        if len({len(row) for row in dilations}) != 1 or not all(size % 2 for size in taps):
            raise CheckpointError(
                f"vocoder/config.json has {prefix}resnet_dilations {dilations} and {prefix}resnet_kernel_sizes {taps}; "
                "supported are equally many dilations in each block, and odd sizes"
            )
        kind, antialiased = settings[f"{prefix}act_fn"], settings[f"{prefix}antialias"]
        if _ACTIVATIONS.get(kind) != antialiased:
            raise CheckpointError(
                f"vocoder/config.json has {prefix}act_fn {kind!r} with {prefix}antialias {antialiased}; supported are "
                "'snakebeta' with antialias and 'leaky_relu' without"
            )
        if (ratio := settings[f"{prefix}antialias_ratio"]) != _RATIO:
            raise CheckpointError(f"vocoder/config.json has {prefix}antialias_ratio {ratio}; supported is {_RATIO}")
        if (final := settings[f"{prefix}final_act_fn"]) not in _FINAL:
            raise CheckpointError(f"vocoder/config.json has {prefix}final_act_fn {final!r}; it is tanh, clamp or null")
        sizes = zip(settings[f"{prefix}upsample_kernel_sizes"], settings[f"{prefix}upsample_factors"], strict=True)
        for size, factor in sizes:
            if size < factor or (size - factor) % 2:
                raise CheckpointError(
                    f"vocoder/config.json has an upsampling by {factor} with {size} taps; supported are as many taps, "
                    "or 2, 4, ... more"
                )
    if extended:
        _check_extension(settings)


def _check_extension(settings: dict[str, Any]) -> None:
    hop, rates = settings["hop_length"], (settings["input_sampling_rate"], settings["output_sampling_rate"])
    if settings["filter_length"] != settings["window_length"]:
        raise CheckpointError(
            f"vocoder/config.json has filter_length {settings['filter_length']} and window_length "
            f"{settings['window_length']}; supported are equal ones"
        )
    if math.prod(settings["upsample_factors"]) % hop or rates[1] % rates[0]:
        raise CheckpointError(
            f"vocoder/config.json has hop_length {hop} and rates {rates[0]} and {rates[1]}; each mel frame is a whole "
            "number of hops, and one rate a multiple of the other"
        )
    if math.prod(settings["bwe_upsample_factors"]) * rates[0] != hop * rates[1]:
        raise CheckpointError(
            f"vocoder/config.json has bwe_upsample_factors {settings['bwe_upsample_factors']}; their product is "
            f"{hop * rates[1] // rates[0]}, the samples of a hop"
        )
