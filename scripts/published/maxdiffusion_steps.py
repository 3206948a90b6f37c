"""A denoise step as github.com/AI-Hypercomputer/maxdiffusion (7cfb8801) runs it: its own transformer, from a checkout.

Of that package only the transformer is imported: what its `pyconfig` and `WanPipeline` do around it (weights' dtypes
and shardings, rules of axes, both branches of guidance in one batch) is done here by the same rules.
"""

import functools
import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wan_tpu.runtime.program import ON_TENSOR_CORE

TEXT = 512  # The tokens of a prompt.
# `pyconfig` puts these before and after a configuration's own rules of axes, where attention is Ulysses or a ring.
BEFORE = tuple(
    (f"activation_{part}", axis)
    for of in ("self", "cross")
    for part, axis in (
        (f"{of}_attn_heads", None),
        (f"{of}_attn_q_length", "context"),
        (f"{of}_attn_kv_length", "context"),
    )
)
AFTER = (("activation_length", "context"), ("activation_kv_length", "context"), ("layers_per_stage", None))
FLOAT32 = ("norm", "condition_embedder", "scale_shift_table")  # Weights with one of these in their names stay float32.


@dataclass(frozen=True)
class Setting:
    """The settings of a run of maxdiffusion.

    Attributes:
        attention: The attention's registered name.
        tile: Its `flash_block_sizes`.
        ulysses: How many of the devices along 'context' exchange heads; the others form a ring.
        uniform: Whether every head takes the fixed shift. Its kernel otherwise decides by the data, which bundles can't
            show.
        channels: The channels of the latents, including those of an image.
        config: The configuration file.
    """

    attention: str
    tile: dict[str, int]
    ulysses: int = -1
    uniform: bool = False
    channels: int = 16
    config: str = "base_wan_27b.yml"


def step(checkout: Path, mesh: Mesh, setting: Setting) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a guided step of Wan 2.2 A14B at 1280x720 and 81 frames, and its arguments, `jax.ShapeDtypeStruct`s.

    This needs flax and everything else that the package imports; ImportError says what is missing.
    """
    import yaml

    if (source := str(checkout / "src")) not in sys.path:
        sys.path.insert(0, source)
    nnx, linen = (importlib.import_module(f"flax.{name}") for name in ("nnx", "linen"))
    transformers = importlib.import_module("maxdiffusion.models.wan.transformers.transformer_wan")
    package = Path(transformers.__file__ or "").parents[3]
    kernels: Any = importlib.import_module("maxdiffusion.kernels.custom_splash_attention")
    kernel = getattr(kernels._flash_attention_kernel, "func", kernels._flash_attention_kernel)  # without what was set
    kernels._flash_attention_kernel = functools.partial(kernel, uniform_fixed_m=True) if setting.uniform else kernel
    config = yaml.safe_load((package / "configs" / setting.config).read_text())
    rules = (*BEFORE, *(tuple(_tuples(rule)) for rule in config["logical_axis_rules"]), *AFTER)

    def build(rngs: Any) -> Any:
        return transformers.WanModel(
            rngs=rngs,
            in_channels=setting.channels,
            mesh=mesh,
            dtype=jnp.bfloat16,
            weights_dtype=jnp.bfloat16,
            attention=setting.attention,
            flash_block_sizes=_sizes(setting),
            remat_policy=config["remat_policy"],
            flash_min_seq_length=config["flash_min_seq_length"],
            mask_padding_tokens=config["mask_padding_tokens"],
            scan_layers=config["scan_layers"],
            attention_config={
                "use_base2_exp": config["use_base2_exp"],
                "use_experimental_scheduler": config["use_experimental_scheduler"],
                "ulysses_shards": setting.ulysses,
            },
        )

    graph, weights, rest = nnx.split(nnx.eval_shape(build, rngs=nnx.Rngs(0)), nnx.Param, ...)
    shardings = dict(nnx.to_flat_state(linen.logical_to_mesh_sharding(nnx.get_partition_spec(weights), mesh, rules)))
    abstract = nnx.from_flat_state(
        {
            name: value.replace(_abstract(".".join(map(str, name)), value, shardings[name]))
            for name, value in nnx.to_flat_state(weights)
        }
    )

    def run(weights: Any, rest: Any, latents: jax.Array, timestep: jax.Array, text: jax.Array) -> jax.Array:
        with linen.partitioning.axis_rules(rules):
            model = nnx.merge(graph, weights, rest)
            noise = model(hidden_states=latents, timestep=timestep, encoder_hidden_states=text)
        with_prompt, without = jnp.split(noise, 2)
        return without + 4.0 * (with_prompt - without)

    by_branch = NamedSharding(mesh, P("data"))
    latents = jax.ShapeDtypeStruct((2, setting.channels, 21, 90, 160), jnp.bfloat16, sharding=by_branch)
    timestep = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=by_branch)
    text = jax.ShapeDtypeStruct((2, TEXT, 4096), jnp.bfloat16, sharding=by_branch)
    return run, (abstract, rest, latents, timestep, text)


def flags(checkout: Path) -> dict[str, Any]:
    """Return libtpu's flags of that repository's own script for fast inference, as JAX's compiler options."""
    script = checkout / "end_to_end" / "tpu" / "run_wan_fast_inference.sh"
    match = re.search(r'^export LIBTPU_INIT_ARGS="(--[^"]*)"$', script.read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(f"no flags of libtpu in {script}")
    pairs = dict(argument.removeprefix("--").split("=") for argument in match[1].split()) | ON_TENSOR_CORE
    return {name: value == "true" if value in ("true", "false") else value for name, value in pairs.items()}


def _sizes(setting: Setting) -> Any:
    """Return the tile as the kernel of that name takes it."""
    if "custom" in setting.attention:
        return importlib.import_module("maxdiffusion.max_utils").CustomFlashBlockSizes(**setting.tile)
    return importlib.import_module("maxdiffusion.common_types").BlockSizes(**setting.tile)


def _abstract(name: str, value: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    dtype = jnp.float32 if any(part in name for part in FLOAT32) else jnp.bfloat16
    return jax.ShapeDtypeStruct(value.shape, dtype, sharding=getattr(sharding, "value", sharding))


def _tuples(rule: list[Any]) -> list[Any]:
    return [tuple(part) if isinstance(part, list) else part for part in rule]
