"""MiniMax-H3's video VAE on a mesh: the arithmetic of diffusers' AutoencoderKLMiniMaxH3.

The decoder, a transformer, sees clips of seven latent frames, two of which it shares with the clip before. It makes 28
frames of a clip and keeps 22, the last five of which fade into the next clip's first. Each clip's picture is cut into
tiles, and the tiles of some clips (`clips.chunk_lengths`) are divided among the devices, each of which has all weights.

Shapes: N tiles, T frames, H W height and width, C channels.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import AutoencoderKLMiniMaxH3
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from wan_tpu.errors import CheckpointError
from wan_tpu.families.minimax_h3 import clip_encoder, encoder
from wan_tpu.families.minimax_h3.clips import CLIP_FRAMES, CLIP_LATENTS, DECODED_LATENTS
from wan_tpu.families.minimax_h3.components import pair_channels
from wan_tpu.families.minimax_h3.config import STRIDE, MiniMaxH3Config
from wan_tpu.families.minimax_h3.tiling import Tiling, lay_line
from wan_tpu.families.minimax_h3.vit import decode_tiles
from wan_tpu.families.shared.causal_vae import Cache, Chunks
from wan_tpu.families.shared.convolutions import Changes, lay_out
from wan_tpu.families.shared.flop_count import count
from wan_tpu.families.shared.tiles import blend
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.components import Component
from wan_tpu.runtime.mesh import Rule, replicated_sharding

# The mean and deviation by which diffusers normalises pixels: those of ImageNet's red, green and blue.
PIXEL_MEAN, PIXEL_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FADED = 5  # Frames that fade into the next clip's.
TILE, OVERLAP = 16, 4  # A tile's side, and the least that neighbours share, in pixels of the latents.
TILES = 8  # The most tiles that a device decodes at once.
SEED = 42  # Of the noise that a keyframe's latents are drawn with, whatever the request's seed.

_DROPPED = 3  # Frames that a group of five latent frames begins with and that are no part of the video.
_DECODER = ("decoder", "post_quant_conv")
_GROUP = 20  # Frames that five latent frames become.
# The only values of these keys that are supported: those of the published model.
_FIXED: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "spatial_padding_mode": "reflect",
    "clip_length": 17,
    "token_drop": 3,
}


# ---- Components.


def vae_half(config: MiniMaxH3Config, dropped: str) -> Component:
    """Return the VAE without the half named in `dropped`, replicated on every device.

    Raises:
        CheckpointError: The configuration has a value that the published model doesn't have.
    """
    _check(config.vae)
    # The decoder's table of frequencies isn't used: `vit` makes its own angles.
    unused = {"encoder": ("encoder", "quant_conv", "decoder.rope"), "decoder": _DECODER}[dropped]
    return _half(config, unused, encoder.CHANGES if dropped == "decoder" else _decoder_changes(config.vae))


def clip_half(config: MiniMaxH3Config) -> Component:
    """Return the VAE's encoder with the weights for all frames, which `vae_half` leaves out."""
    _check(config.vae)
    return dataclasses.replace(_half(config, _DECODER, ()), converted="clip.")


def _half(config: MiniMaxH3Config, unused: Sequence[str], changes: Changes) -> Component:
    def adapt(module: torch.nn.Module, mesh: Mesh) -> None:
        for part in unused:
            parent, _, name = part.rpartition(".")
            delattr(module.get_submodule(parent), name)
        lay_out(module, changes)

    return Component(
        "vae",
        functools.partial(_build, config),
        adapt,
        scanned=() if unused == _DECODER else ("decoder.transformer_blocks",),
        rules=(Rule(r".*", ()),),
        float32=tuple(AutoencoderKLMiniMaxH3._keep_in_fp32_modules),
        changes=changes,
    )


def _build(config: MiniMaxH3Config) -> Any:
    return AutoencoderKLMiniMaxH3.from_config(config.vae)


def _check(vae: Mapping[str, Any]) -> None:
    for key, value in _FIXED.items():
        if vae[key] != value:
            raise CheckpointError(f"vae/config.json has {key} = {vae[key]}; supported: {value}, as published")
    strides = [math.prod(vae[f"{kind}_downsample_factors"]) for kind in ("spatial", "temporal")]
    if strides != [STRIDE, 4]:
        raise CheckpointError(
            f"vae/config.json has downsample factors of {strides[0]} pixels and {strides[1]} frames; supported: "
            f"{STRIDE} and 4, as published"
        )


def _decoder_changes(vae: Mapping[str, Any]) -> Changes:
    """Return how weights of the decoder are laid out: channels of queries and keys in our kernels' pairs."""
    heads, width = vae["decoder_num_attention_heads"], vae["decoder_attention_head_dim"]
    angles = int(width * vae["decoder_rope_dim_ratio"]) // 2
    pair = functools.partial(pair_channels, heads=heads, angles=angles)
    return ((r"decoder\.transformer_blocks\.\*\.attn\.to_[qk]\.(weight|bias)", pair),)


# ---- The two halves as chunks.


@dataclass(frozen=True)
class TiledClips(Chunks):
    """One half of the VAE, on tiles that are divided among the devices.

    Attributes:
        module: The half.
        mesh: The devices.
        tile: A tile's side, in pixels of the latents.
        overlap: The least that neighbours share.
    """

    module: Any
    mesh: Mesh
    tile: int = TILE
    overlap: int = OVERLAP

    @property
    def out_format(self) -> Format:
        """The output's layout: row after row."""
        return Format(Layout((0, 1, 2, 3, 4)), replicated_sharding(self.mesh))

    @property
    def cache_format(self) -> Format:
        """The layout of each entry of the cache, of which every device has a complete copy."""
        return self.out_format

    @property
    def platform(self) -> str:
        """The devices' platform."""
        return str(self.mesh.devices.flat[0].platform)

    def lay_tiles(self, height: int, width: int) -> Tiling:
        """Return the tiles of latents of a size."""
        return Tiling(*(lay_line(length, self.tile, self.overlap) for length in (height, width)))

    def map_tiles(
        self, run: Callable[[Params, jax.Array], jax.Array], params: Params, tiles: jax.Array, *, most: int
    ) -> jax.Array:
        """Return run(params, tiles) for all tiles, [N, ...], replicated on every device.

        Args:
            run: Takes tiles of one device, [n, ...].
            params: The weights.
            tiles: All tiles, [N, ...]. Some of zeros are added, so that each device has equally many.
            most: The most tiles that `run` takes at a time, which bounds the memory.
        """
        axes, each = self.mesh.axis_names, -(-len(tiles) // self.mesh.size)
        groups = -(-each // most)
        missing = self.mesh.size * groups * -(-each // groups) - len(tiles)
        padded = jnp.pad(tiles, ((0, missing), *[(0, 0)] * (tiles.ndim - 1)))

        def run_on_device(params: Params, tiles: jax.Array) -> jax.Array:
            grouped = tiles.reshape(groups, -1, *tiles.shape[1:])
            out = jax.lax.map(functools.partial(run, params), grouped)
            out = out.reshape(-1, *out.shape[2:])
            return jax.lax.all_gather(out, axes, axis=0, tiled=True) if self.mesh.size > 1 else out

        local = jax.shard_map(run_on_device, mesh=self.mesh, in_specs=(P(), P(axes)), out_specs=P(), check_vma=False)
        whole: jax.Array = local(params, padded)
        return whole[: len(tiles)]


class ClipDecoder(TiledClips):
    """The decoder: latents [1, C, T, H, W] of `chunk_lengths` to pixels around [-1, 1].

    The latents come from `denormalise`. A clip becomes 17 frames, and the video's last one 22.
    """

    def run_first(self, params: Params, x: jax.Array) -> tuple[jax.Array, Cache]:
        """Decode the first clips; the cache has latents of the next one, and the frames that fade into it."""
        return self._decode(params, x, None)

    def run_next(self, params: Params, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Decode the next clips."""
        latents, faded = cache
        return self._decode(params, jnp.concatenate([latents, x], axis=2), faded[0].astype(jnp.float32))

    def _decode(self, params: Params, latents: jax.Array, faded: jax.Array | None) -> tuple[jax.Array, Cache]:
        """Decode clips.

        Args:
            params: The weights.
            latents: Those of all clips, and another frame's if there are more clips.
            faded: The frames [3, T, H, W] that fade into the first clip's, float32.
        """
        clips, rest = divmod(latents.shape[2], CLIP_LATENTS)
        frames = []
        for pixels in self._decode_clips(params, latents, clips):
            whole = pixels if faded is None else blend(faded, pixels, FADED, axis=1)
            frames.append(whole[:, :-FADED])
            faded = whole[:, -FADED:]
        assert faded is not None
        cache: Cache = ()
        if rest == DECODED_LATENTS - CLIP_LATENTS:
            frames.append(faded)
        else:
            cache = (latents[:, :, clips * CLIP_LATENTS :], faded.astype(latents.dtype)[None])
        return _to_unit_range(jnp.concatenate(frames, axis=1)).astype(latents.dtype)[None], cache

    def _decode_clips(self, params: Params, latents: jax.Array, clips: int) -> list[jax.Array]:
        """Return the frames [3, T, H, W] of each clip that are part of the video, normalised, float32."""
        vae, dtype = self.module.config, latents.dtype
        weight, bias = params["post_quant_conv.weight"], params["post_quant_conv.bias"].astype(jnp.float32)
        latents = jnp.einsum("cthw,oc->othw", latents[0], weight[:, :, 0, 0, 0], preferred_element_type=jnp.float32)
        latents = (latents + bias[:, None, None, None]).astype(dtype)
        tiling = self.lay_tiles(*latents.shape[2:])
        starts = range(0, clips * CLIP_LATENTS, CLIP_LATENTS)
        tiles = jnp.concatenate([tiling.cut(latents[:, start : start + DECODED_LATENTS]) for start in starts])

        def run(params: Params, tiles: jax.Array) -> jax.Array:
            pixels = decode_tiles(vae, params, tiles, self.platform)
            return jnp.concatenate([pixels[:, :, _DROPPED:_GROUP], pixels[:, :, _GROUP + _DROPPED :]], axis=2)

        decoded = self.map_tiles(run, params, tiles, most=TILES)
        return [tiling.enlarge(STRIDE).join(of_clip) for of_clip in jnp.split(decoded, clips)]


class KeyframeEncoder(TiledClips):
    """The encoder: one keyframe a chunk, [1, 3, 1, H, W] from 0 to 255, to moments, float32 [1, 2C, 1, H, W].

    bfloat16 holds such pixels exactly.
    """

    def run_first(self, params: Params, x: jax.Array) -> tuple[jax.Array, Cache]:
        """Encode a keyframe."""

        def encode(params: Params, tile: jax.Array) -> jax.Array:
            return encoder.encode_tile(self.module, params, self.mesh, tile)

        return self._encode(params, x, encode), ()

    def run_next(self, params: Params, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Encode another keyframe, independently of the first one."""
        return self.run_first(params, x)

    def encode_clip(self, params: Params, x: jax.Array) -> jax.Array:
        """Encode a clip of frames, [1, 3, T, H, W], with the weights of `clip_half`; float32 [1, 2C, T, H, W]."""
        return self._encode(params, x, functools.partial(clip_encoder.encode_tile, self.module))

    def _encode(self, params: Params, x: jax.Array, encode: Callable[[Params, jax.Array], jax.Array]) -> jax.Array:
        """Return the moments of pixels, tile by tile."""
        pixels = (x[0].astype(jnp.float32) / 255 - _column(PIXEL_MEAN)) / _column(PIXEL_DEVIATION)
        tiling = self.lay_tiles(*(size // STRIDE for size in pixels.shape[2:]))

        def run(params: Params, tiles: jax.Array) -> jax.Array:
            return encode(params, tiles[0])[None]

        return tiling.join(self.map_tiles(run, params, tiling.enlarge(STRIDE).cut(pixels), most=1))[None]


def _to_unit_range(pixels: jax.Array) -> jax.Array:
    """Turn normalised pixels [3, T, H, W] into the range around -1 to 1, as other VAEs decode them."""
    # As in diffusers, values are clipped later, after the check for Inf.
    return (pixels * _column(PIXEL_DEVIATION) + _column(PIXEL_MEAN)) * 2 - 1


def _column(values: Any) -> jax.Array:
    """Return one value for each channel of [C, T, H, W], float32."""
    return jnp.asarray(values, jnp.float32)[:, None, None, None]


# ---- On the host.


def image_latents(config: MiniMaxH3Config, moments: np.ndarray) -> np.ndarray:
    """Draw normalised latents of keyframes from the encoder's output [1, 2C, T, H, W], float32 [1, C, T, H, W].

    Each keyframe's noise comes from its own generator with the same seed. As in diffusers, the latents are rounded to
    float16 before they are normalised.
    """
    return np.concatenate(
        [draw_latents(config, frame) for frame in np.split(moments, moments.shape[2], axis=2)], axis=2
    )


def draw_latents(config: MiniMaxH3Config, moments: np.ndarray) -> np.ndarray:
    """Draw the same of an image, or of a whole video."""
    mean, deviation = _statistics(config)
    distribution = DiagonalGaussianDistribution(torch.from_numpy(moments.astype(np.float32)))
    latents = distribution.sample(torch.Generator().manual_seed(SEED))
    return (latents.numpy().astype(np.float16).astype(np.float32) - mean) / deviation


def denormalise(config: MiniMaxH3Config, latents: np.ndarray) -> np.ndarray:
    """Return latents [1, C, T, H, W] of the transformer as the decoder takes them, float32."""
    mean, deviation = _statistics(config)
    return latents * deviation + mean


def _statistics(config: MiniMaxH3Config) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and deviation of the latents' channels, each float32 [C, 1, 1, 1]."""
    mean, deviation = (np.array(config.vae[f"latents_{kind}"], np.float32) for kind in ("mean", "std"))
    return mean[:, None, None, None], deviation[:, None, None, None]


# ---- Operations.


def count_decoding(config: MiniMaxH3Config, shape: tuple[int, ...]) -> int:
    """Count the operations of decoding latents [1, C, T, H, W]: those of a tile, for all tiles of all clips."""
    _, channels, frames, height, width = shape
    tiling = Tiling(lay_line(height, TILE, OVERLAP), lay_line(width, TILE, OVERLAP))
    latents = torch.empty(1, channels, DECODED_LATENTS, tiling.rows.size, tiling.columns.size, device="meta")
    operations = count(functools.partial(_build, config), lambda module: module.decode(latents))
    return operations * tiling.count * (frames // CLIP_LATENTS)


def count_encoding(config: MiniMaxH3Config, height: int, width: int) -> int:
    """Count the operations of encoding a keyframe of a size."""
    tiling = Tiling(*(lay_line(length // STRIDE, TILE, OVERLAP) for length in (height, width))).enlarge(STRIDE)
    pixels = torch.empty(1, 3, 1, tiling.rows.size, tiling.columns.size, device="meta")

    def run(module: Any) -> None:
        # The frames before the only one are zeros, so two of three taps are left out.
        for part in module.encoder.modules():
            if isinstance(part, torch.nn.Conv3d) and part.kernel_size[0] > 1:
                part.weight, part.temporal_padding = torch.nn.Parameter(part.weight[:, :, -1:]), 0
        module.encode(pixels)

    return count(functools.partial(_build, config), run) * tiling.count


def count_clip(config: MiniMaxH3Config, height: int, width: int) -> int:
    """Count the operations of encoding a clip of frames of a size."""
    tiling = Tiling(*(lay_line(length // STRIDE, TILE, OVERLAP) for length in (height, width))).enlarge(STRIDE)
    pixels = torch.empty(1, 3, CLIP_FRAMES, tiling.rows.size, tiling.columns.size, device="meta")
    return count(functools.partial(_build, config), lambda module: module.encode(pixels)) * tiling.count
