"""The model that doubles the width and height of LTX-2's latents between two stages, on strips of a picture.

It is diffusers' LTX2LatentUpsamplerModel: residual blocks of 3x3x3 convolutions, before and after channels become
pixels. Its group norms take their statistics over all frames and the whole picture. At 17 x 30 latents in 16 frames it
computes 19 TFLOP, a tenth of a second and more on one chip, so it is cut over all devices.

Shapes: T frames, X columns and Y rows of a device's strip, C channels; W H width and height of the latents.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from wan_tpu.errors import CheckpointError
from wan_tpu.families.ltx2.config import Ltx2Config
from wan_tpu.families.ltx2.vae import spread, spreading_changes
from wan_tpu.families.shared.convolutions import convolve, lay_out, taps_first
from wan_tpu.families.shared.group_norms import fold_norm, normalise
from wan_tpu.ops.halo import HaloCut, cut_picture, strip_spec
from wan_tpu.runtime.bridge import Params, call, to_jax, to_torch
from wan_tpu.runtime.components import Component
from wan_tpu.runtime.mesh import Rule
from wan_tpu_kernels.vae.causal_conv import zero_outside

_DOUBLING = (1, 2, 2)
# What the published models have, and what is supported.
_FIXED = {"dims": 3, "spatial_upsample": True, "temporal_upsample": False}


def upsampler(config: Ltx2Config) -> Component:
    """Return the upsampler, replicated on every device.

    Raises:
        CheckpointError: There is none, or it doesn't just double width and height.
    """
    settings = config.upsampler
    if settings is None:
        raise CheckpointError(
            "this checkpoint has no folder latent_upsampler, which two stages need; give one that "
            "has it, or ask for one stage"
        )
    expected = _FIXED | ({"rational_spatial_scale": 2.0} if settings["use_rational_resampler"] else {})
    for key, value in expected.items():
        if settings[key] != value:
            raise CheckpointError(
                f"latent_upsampler/config.json has {key} = {settings[key]}; supported: {value}, as published"
            )
    enlarging = r"upsampler\.(conv|0)"
    changes = (*spreading_changes(enlarging, _DOUBLING), (r".*conv\d?\.weight", taps_first))

    def adapt(module: torch.nn.Module, mesh: Mesh) -> None:
        if settings["use_rational_resampler"]:
            del module.get_submodule("upsampler").blur_down  # It is for shrinking, which this model doesn't do.
        lay_out(module, changes)

    return Component(
        "latent_upsampler",
        lambda: LTX2LatentUpsamplerModel.from_config(settings),
        adapt,
        scanned=(),
        rules=(Rule(r".*", ()),),
        changes=changes,
    )


def upsample(
    module: torch.nn.Module, params: Params, mesh: Mesh, latents: jax.Array, mean: jax.Array, deviation: jax.Array
) -> jax.Array:
    """Double width and height of normalised latents.

    Args:
        module, params: The upsampler.
        mesh: The devices.
        latents: float32 [1, C, T, H, W], the same on every device.
        mean, deviation: `latents_mean` of the VAE, and `latents_std` divided by its scaling factor, [C].

    Returns:
        Normalised latents, float32 [1, C, T, 2H, 2W].
    """
    cut = cut_picture(mesh, *latents.shape[3:])
    mean, deviation = (values.astype(jnp.float32) for values in (mean, deviation))

    def device(params: Params, strip: jax.Array) -> jax.Array:
        return cut.gather(call(module, params, lambda module: to_torch(_run(module, cut, strip))))

    pixels = latents[0].transpose(1, 3, 2, 0) * deviation + mean  # [T, W, H, C]
    spec = strip_spec(mesh)
    run = jax.shard_map(device, mesh=mesh, in_specs=(P(), spec), out_specs=P(), check_vma=False)
    doubled = run(params, cut.pad(pixels.astype(params["initial_conv.weight"].dtype)))
    normalised = (doubled.astype(jnp.float32) - mean) / deviation
    return normalised.transpose(3, 0, 2, 1)[None]


def _run(module: Any, cut: HaloCut, x: jax.Array) -> jax.Array:
    x = _norm(module.initial_norm, cut, _conv(module.initial_conv, cut, x))
    for block in module.res_blocks:
        x = _residual_block(block, cut, x)
    conv = module.upsampler[0] if isinstance(module.upsampler, torch.nn.Sequential) else module.upsampler.conv
    four = convolve(cut, x, to_jax(conv.weight), to_jax(conv.bias), before=(1, 1))
    x = spread(cut, four, _DOUBLING)
    for block in module.post_upsample_res_blocks:
        x = _residual_block(block, cut, x)
    return _conv(module.final_conv, cut, x)


def _residual_block(block: Any, cut: HaloCut, x: jax.Array) -> jax.Array:
    hidden = _norm(block.norm1, cut, _conv(block.conv1, cut, x))
    return _norm(block.norm2, cut, _conv(block.conv2, cut, hidden), residual=x)


def _conv(conv: Any, cut: HaloCut, x: jax.Array) -> jax.Array:
    """Apply a Conv3d of 3x3x3 taps with zeros before the first frame and after the last."""
    frames = jnp.pad(x, ((1, 1), (0, 0), (0, 0), (0, 0)))
    return convolve(cut, frames, to_jax(conv.weight), to_jax(conv.bias), before=(1, 1), centred=True)[1:-1]


def _norm(norm: Any, cut: HaloCut, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
    """Apply a GroupNorm over all frames and the whole picture, add a residual, and apply SiLU."""
    if residual is None:
        return normalise(norm, cut, x)
    scale, shift = fold_norm(norm, cut, x)
    total = x.astype(jnp.float32) * scale + shift + residual.astype(jnp.float32)
    return zero_outside(jax.nn.silu(total), *cut.inside(x)).astype(x.dtype)
