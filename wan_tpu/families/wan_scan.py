"""Run equal residual blocks of a Wan VAE in one `jax.lax.scan`: the TPU compiler takes 10 s and more a convolution.

Parameter names stay the checkpoint's; weights and caches are stacked inside the program.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from diffusers.models.autoencoders import autoencoder_kl_wan as wan

from wan_tpu.bridge import to_jax, to_torch

CACHED = 2  # causal convolutions in a residual block whose channels stay: its shortcut is the identity


def scan_residual_blocks(module: torch.nn.Module) -> None:
    """Let every list of layers in an AutoencoderKLWan run neighbours that are equal residual blocks as one."""
    for child in list(module.modules()):
        if type(child) is wan.WanMidBlock:  # pairs its blocks with attention
            continue
        for name, layers in list(child.named_children()):
            if type(layers) is torch.nn.ModuleList and any(type(layer) is wan.WanResidualBlock for layer in layers):
                setattr(child, name, _Runs(layers))


class _Runs(torch.nn.ModuleList):
    """A list of layers that iterates over its runs of equal residual blocks, each one callable, and other layers."""

    def __iter__(self) -> Iterator[Any]:
        for shapes, layers in itertools.groupby(super().__iter__(), _shapes):
            run = list(layers)
            if shapes is None or len(run) == 1:
                yield from run
            else:
                yield functools.partial(_scan, run)


def _shapes(layer: torch.nn.Module) -> list[tuple[str, torch.Size]] | None:
    """Return what equal residual blocks have in common, None for other layers."""
    if type(layer) is not wan.WanResidualBlock:
        return None
    return [(name, parameter.shape) for name, parameter in layer.named_parameters()]


def _scan(blocks: list[Any], x: torch.Tensor, feat_cache: list[Any], feat_idx: list[int]) -> torch.Tensor:
    """Do what calling the blocks one after the other does, to x [N, C, T, H, W] and to the cache."""
    start, count = feat_idx[0], len(blocks)
    feat_idx[0] += CACHED * count
    weights = _stack([to_jax(dict(block.named_parameters())) for block in blocks])
    entries = [to_jax(feat_cache[start + CACHED * i :][:CACHED]) for i in range(count)]
    past = None if entries[0][0] is None else _stack(entries)

    def step(x: jax.Array, given: Any) -> tuple[jax.Array, list[jax.Array]]:
        weights, past = given
        cache = [None] * CACHED if past is None else to_torch(past)
        arguments = {"feat_cache": cache, "feat_idx": [0]}
        out = torch.func.functional_call(blocks[0], to_torch(weights), (to_torch(x),), arguments)
        return to_jax(out), to_jax(cache)

    out, caches = jax.lax.scan(step, to_jax(x), (weights, past))
    for i in range(count):
        feat_cache[start + CACHED * i : start + CACHED * (i + 1)] = [to_torch(entry[i]) for entry in caches]
    return to_torch(out)


def _stack(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
