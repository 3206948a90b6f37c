"""LTX-2.5's diffusion decoder on strips of a picture: the arithmetic of diffusers' LTX2VideoDiffusionDecoderModel.

It has no convolutions: tokens attend to a window around them, which is moved inwards at the borders, so that it is
always full. Four stages turn latents into a context of one vector for 4 x 4 pixels of a frame; a fifth turns noise into
pixels in a single step, with that context.

Shapes: T frames, X columns and Y rows of a device's strip, C channels, N heads, D head width.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import LTX2VideoDiffusionDecoderModel
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from wan_tpu.errors import CheckpointError
from wan_tpu.families.ltx2.vae import join_patches, order_outputs, split_patches, spread
from wan_tpu.families.shared.causal_vae import Cache, Chunks, gather_planes
from wan_tpu.families.shared.tokens import half_split
from wan_tpu.ops.dispatch import ops_for
from wan_tpu.ops.halo import HaloCut, strip_spec
from wan_tpu.runtime.bridge import Params, call, select_part
from wan_tpu.runtime.components import Component
from wan_tpu.runtime.mesh import Rule
from wan_tpu_kernels.windows.attention import count_side_columns

_EPSILON, _THETA = 1e-6, 10000.0
_STATISTICS = ("latents_mean", "latents_std")
# The only values of these keys that the published decoder has, and that are supported.
_FIXED: dict[str, Any] = {"decoder_model_output_type": "x0", "decoder_num_inference_steps": 1, "out_channels": 3}

Kernel = Sequence[int]  # Of a window: frames, columns, rows.


def decoder(config: Mapping[str, Any]) -> Component:
    """Return the diffusion decoder.

    Raises:
        CheckpointError: The configuration has a value that the published decoder doesn't have.
    """
    for key, value in _FIXED.items():
        if config[key] != value:
            raise CheckpointError(
                f"diffusion_decoder/config.json has {key} = {config[key]}; supported: {value}, as published"
            )
    heads = [channels // config["decoder_head_dim"] for channels in config["decoder_stage_channels"]]
    paths = _list_stages(config)
    changes = [
        (rf"{re.escape(path)}\.\*\.attn\.to_[qk]\.(weight|bias)", functools.partial(half_split, number))
        for path, number in zip(paths, heads, strict=True)
    ]
    changes.append((r".*\.attn\.norm_[qk]\.weight", functools.partial(half_split, 1)))
    for stage, strides in enumerate(config["decoder_upsample_strides"]):
        order = functools.partial(order_outputs, strides=strides)
        changes.append((rf"decoder\.upsamples\.{stage}\.proj\.(weight|bias)", order))
    return Component(
        folder="diffusion_decoder",
        build=functools.partial(_build, config),
        adapt=lambda module, mesh: None,
        scanned=paths,
        rules=(Rule(".*", ()),),
        float32=_STATISTICS,
        changes=tuple(changes),
    )


def _build(config: Mapping[str, Any]) -> torch.nn.Module:
    return LTX2VideoDiffusionDecoderModel.from_config(dict(config))


def _list_stages(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the lists of blocks of all stages, by their places in the module."""
    deterministic = range(len(config["decoder_upsample_strides"]))
    return (*(f"decoder.det_stages.{i}" for i in deterministic), "decoder.diff_blocks")


def count_flops(config: Mapping[str, Any], shape: Sequence[int]) -> int:
    """Count the operations of decoding latents [1, C, T, H, W], with windows of exactly their keys."""
    grid = [shape[2] + _ghosts(config), *shape[3:]]
    channels, depths = config["decoder_stage_channels"], config["decoder_stage_depths"]
    total: int = 2 * math.prod(grid) * config["latent_channels"] * channels[0]
    for stage, stride in enumerate(config["decoder_upsample_strides"]):
        total += depths[stage] * _count_block(math.prod(grid), channels[stage], config["decoder_stage_kernels"][stage])
        total += 2 * math.prod(grid) * channels[stage] * channels[stage + 1] * math.prod(stride)
        grid = [size * step for size, step in zip(grid, stride, strict=True)]
        grid[0] -= stride[0] - 1
    grid[0] -= _ghosts(config) * config["temporal_compression_ratio"]
    pixels, width_5 = config["out_channels"] * config["patch_size"] ** 2, channels[-1]
    block = _count_block(math.prod(grid), width_5, config["decoder_stage5_kernel"])
    total += depths[-1] * (block + 2 * math.prod(grid) * width_5**2)
    return total + 4 * math.prod(grid) * width_5 * pixels


def _count_block(tokens: int, channels: int, kernel: Kernel) -> int:
    """Return the operations of a block's matrices, of which the feed-forward layer has three, and of its windows."""
    return 2 * tokens * channels * (4 * channels + 12 * channels + 2 * math.prod(kernel))


def _ghosts(config: Mapping[str, Any]) -> int:
    """Return how many copies of the last latent frame are appended, so that the border's windows end beyond it."""
    return int(config["decoder_stage_kernels"][0][0]) // 2 * 2


@dataclass(frozen=True)
class DiffusionChunks(Chunks):
    """The decoder as a single chunk: latents [1, C, T, H, W] and noise [1, 3, F, 32H, 32W] become pixels."""

    config: Mapping[str, Any]
    module: torch.nn.Module
    mesh: Mesh

    def run_first(self, params: Params, x: Any) -> tuple[jax.Array, Cache]:
        """Decode normalised float32 latents with noise, both whole; return pixels around [-1, 1], and no cache."""
        latents, noise = x
        cut = HaloCut(self.mesh, latents.shape[3], latents.shape[4], row_unit=1)
        modulation = call(self.module, params, _modulate, jnp.ones(1))
        ghosts = jnp.repeat(latents[:, :, -1:], _ghosts(self.config), axis=2)
        latents = jnp.concatenate([latents, ghosts], axis=2)

        def device(params: Params, latents: jax.Array, noise: jax.Array, modulation: jax.Array) -> jax.Array:
            return gather_planes(cut, _Strip(self.config, params, cut).decode(latents, noise, modulation))

        spec, planes = strip_spec(self.mesh), P(None, None, self.mesh.axis_names)
        run = jax.shard_map(device, mesh=self.mesh, in_specs=(P(), spec, planes, P()), out_specs=P(), check_vma=False)
        # Three channels of noise in a TPU's 128 lanes would be 42 times the bytes.
        pictures, noises = cut.pad(latents[0].transpose(1, 3, 2, 0)), noise[0].transpose(0, 1, 3, 2)
        missing = cut.held_columns * self.mesh.size * (noises.shape[2] // cut.width) - noises.shape[2]
        noises = jnp.pad(noises, ((0, 0), (0, 0), (0, missing), (0, 0)))
        return run(params, pictures, noises, modulation).transpose(0, 1, 3, 2)[None], ()

    def run_next(self, params: Params, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """There is only one chunk."""
        raise NotImplementedError


def _modulate(module: Any, time: torch.Tensor) -> torch.Tensor:
    """Return the scales and shifts of a step, [7, C], at a time from 1, of noise alone, to 0."""
    half = module.decoder
    embedding = half.t_embedder(
        half.timestep_scale_multiplier * time,
        resolution=None,
        aspect_ratio=None,
        batch_size=1,
        hidden_dtype=half.shared_adaln.proj.weight.dtype,
    )
    return torch.cat([chunk.flatten(1) for chunk in half.shared_adaln(embedding)])


class _Strip:
    """The decoder on one device's columns, inside `jax.shard_map`."""

    def __init__(self, config: Mapping[str, Any], params: Params, cut: HaloCut) -> None:
        self._config, self._params, self._cut = config, params, cut

    def decode(self, latents: jax.Array, noise: jax.Array, modulation: jax.Array) -> jax.Array:
        """Return planes of pixels [3, F, sX, sY] of latents [T, X, Y, C] and noise [3, F, sX, sY]."""
        config, linear = self._config, functools.partial(_linear, self._params)
        mean, deviation = (self._params[name] for name in _STATISTICS)
        weight = self._params["decoder.conv_in.weight"]
        x = (latents * (deviation / config["scaling_factor"]) + mean).astype(weight.dtype)
        x = linear("decoder.conv_in", x)
        for stage, stride in enumerate(config["decoder_upsample_strides"]):
            x = self._run_blocks(f"decoder.det_stages.{stage}", x, config["decoder_stage_kernels"][stage])
            x = spread(self._cut, linear(f"decoder.upsamples.{stage}.proj", x), stride)
            x = x[stride[0] - 1 :]  # Of doubled frames, the first is dropped.
        context = x[: len(x) - _ghosts(config) * config["temporal_compression_ratio"]]
        patches = split_patches(noise.astype(weight.dtype), config["patch_size"])
        x = linear("decoder.conv_in_x_t", patches)
        x = self._run_blocks("decoder.diff_blocks", x, config["decoder_stage5_kernel"], context, modulation)
        x = linear("decoder.conv_out", _norm(x, self._params["decoder.norm_out.weight"]))
        return join_patches(x, config["patch_size"])

    def _run_blocks(
        self,
        path: str,
        x: jax.Array,
        kernel: Kernel,
        context: jax.Array | None = None,
        modulation: jax.Array | None = None,
    ) -> jax.Array:
        """Run all blocks of a stage on [T, X, Y, C]."""
        time, down, across = kernel
        ops = ops_for(self._cut.mesh.devices.flat[0].platform)
        window = _Window(self._cut, (time, across, down), x.shape, self._config["decoder_head_dim"])

        def step(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
            vectors = {name: value.astype(jnp.float32) for name, value in weights.items() if value.ndim == 1}
            scales: Sequence[Any] = (0.0, 0.0, 0.0, 0.0)
            if modulation is not None:
                sums = modulation.astype(jnp.float32) + weights["scale_shift_table"].astype(jnp.float32)
                scales = tuple(sums[i] for i in (0, 1, 3, 4))
            scale, shift, mlp_scale, mlp_shift = scales
            norm1, norm2 = vectors["norm1.weight"], vectors["norm2.weight"]
            linears = {name: _read_linear(weights, f"attn.to_{name}") for name in "qkv"}
            if context is not None:
                linears["context"] = _read_linear(weights, "context_proj")
            norms = {name: vectors[f"attn.norm_{name}.weight"] for name in "qk"}
            rows = {"scale": norm1 * (1 + scale), "shift": jnp.zeros_like(norm1) + shift}
            rows |= {"q": norms["q"] * window.scale, "k": norms["k"]}
            x, query, key, value = ops.norm_qkv(
                x, context, linears, rows, window.tables, reach=window.reach, eps=_EPSILON
            )
            attended = ops.window_attention(
                query,
                window.fill_sides(key),
                window.fill_sides(value),
                window.start,
                window.find_largest(norms),
                heads=x.shape[3] // window.width,
                window=window.kernel,
                width=window.picture_columns,
            )
            flat = x.reshape(-1, x.shape[3])
            matrices = {name: weights[f"mlp.w_{name}.weight"] for name in ("gate", "up", "down")}
            matrices["out"], bias = _read_linear(weights, "attn.to_out.0")
            rows = {"bias": bias, "scale": norm2 * (1 + mlp_scale), "shift": jnp.zeros_like(norm2) + mlp_shift}
            out = ops.norm_swiglu(attended.reshape(flat.shape), flat, matrices, rows, eps=_EPSILON)
            return out.reshape(x.shape), None

        result: jax.Array = jax.lax.scan(step, x, select_part(self._params, f"{path}.template"))[0]
        return result


class _Window:
    """The windows of one stage on one device's strip [T, X, Y, C].

    Attributes:
        kernel: A window's frames, columns and rows.
        width: D.
        picture_columns: The picture's columns.
        start: Which of them the strip's first one is.
        tables: Of the rotation, for `norm_qkv`.
    """

    def __init__(self, cut: HaloCut, kernel: Kernel, shape: Sequence[int], width: int) -> None:
        """Prepare the tables.

        Args:
            cut: How the picture is cut.
            kernel: A window's frames, columns and rows.
            shape: The strip's, [T, X, Y, C].
            width: D.
        """
        self._cut, self.kernel, self.width = cut, kernel, width
        frames, columns, rows = shape[:3]
        self._columns = columns
        self.picture_columns = cut.width * (columns // cut.held_columns)
        self.start = jax.lax.axis_index(cut.mesh.axis_names) * columns if cut.mesh.size > 1 else 0
        of_time, of_row, of_column = self._make_tables(frames, rows, columns * cut.mesh.size)
        own = [jax.lax.dynamic_slice_in_dim(jnp.asarray(table), self.start, columns) for table in of_column]
        self.tables = [tuple(map(jnp.asarray, of_time)), tuple(own), tuple(map(jnp.asarray, of_row))]

    @property
    def reach(self) -> int:
        """How many of the neighbours' columns a strip takes, on either side."""
        return count_side_columns(self._columns, self.picture_columns, self.kernel[1])

    @property
    def scale(self) -> float:
        """The factor of the queries: logits are powers of two."""
        return self.width**-0.5 * math.log2(math.e)

    def find_largest(self, norms: Mapping[str, jax.Array]) -> jax.Array:
        """Return what no logit exceeds: normed heads have at most the length of their weights, times its root.

        Roundings add less than a fiftieth.
        """
        largest = jnp.stack([jnp.max(jnp.abs(norm)) for norm in norms.values()])
        return 1.02 * self.width * self.scale * jnp.prod(largest)

    def _make_tables(self, frames: int, rows: int, columns: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return each axis' cosines and sines, [P, D] for P positions, with zeros in the channels of the others."""
        time = self.width // 4 // 2 * 2
        sides = (self.width - time) // 2
        if sides % 2:
            time, sides = time - 2, sides + 1
        tables, first = [], 0
        for positions, channels in ((frames, time), (rows, sides), (columns, sides)):
            speeds = (1.0 / _THETA ** (np.arange(0, channels, 2) / channels)).astype(np.float32)
            angles = np.arange(positions, dtype=np.float32)[:, None] * speeds
            half = np.zeros((2, positions, self.width // 2), np.float32)
            half[:, :, first : first + channels // 2] = np.cos(angles), np.sin(angles)
            first += channels // 2
            tables.append((np.tile(half[0], 2), np.concatenate([-half[1], half[1]], axis=1)))
        return tables

    def fill_sides(self, x: jax.Array) -> jax.Array:
        """Fill the first and the last columns of [T, R + X + R, Y, C] with those of the strips beside it, or zeros."""
        mesh, reach = self._cut.mesh, self.reach
        columns = x.shape[1] - 2 * reach
        if mesh.size == 1:
            before = after = jnp.zeros_like(x[:, :reach])
        elif columns >= reach:
            pairs = [(i, i + 1) for i in range(mesh.size - 1)]
            before = jax.lax.ppermute(x[:, columns : columns + reach], mesh.axis_names, pairs)
            back = [(to, source) for source, to in pairs]
            after = jax.lax.ppermute(x[:, reach : 2 * reach], mesh.axis_names, back)
        else:
            own = x[:, reach : reach + columns]
            whole = jax.lax.all_gather(own, mesh.axis_names, axis=1, tiled=True)
            whole = jnp.pad(whole, [(0, 0), (reach, reach)] + [(0, 0)] * 2)
            return jax.lax.dynamic_slice_in_dim(whole, self.start, x.shape[1], axis=1)
        x = jax.lax.dynamic_update_slice_in_dim(x, before, 0, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(x, after, reach + columns, axis=1)


def _read_linear(weights: Params, name: str) -> tuple[jax.Array, jax.Array]:
    return weights[f"{name}.weight"], weights[f"{name}.bias"]


def _linear(weights: Params, name: str, x: jax.Array) -> jax.Array:
    product = jnp.einsum("...i,oi->...o", x, weights[f"{name}.weight"], preferred_element_type=jnp.float32)
    if f"{name}.bias" in weights:
        product += weights[f"{name}.bias"].astype(jnp.float32)
    return product.astype(x.dtype)


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Divide vectors by the root mean square of their elements, in float32."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _EPSILON)
    return (normed * weight.astype(jnp.float32)).astype(x.dtype)
