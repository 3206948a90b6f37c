"""Programs whose measured times are published, each with how ours prices the same."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from published import maxdiffusion_steps
from published.maxdiffusion_steps import Setting
from published.pricing import Pricing, Program, Row
from published.torchax_steps import (
    COGVIDEOX,
    HUNYUAN,
    HUNYUAN_SPLASH,
    HUNYUAN_TILE,
    WAN,
    Attention,
    exp2_splash,
    hunyuan,
    jax_splash,
    step,
)
from wan_tpu.pricing.cost import Cost, Times

PEDIA, PEER = "gpu-tpu-pedia", "maxdiffusion"
PROFILE = f"{PEDIA} tpu/Wan2.2/docs/wan_tpu_optimization_guide.md"


def attention_alone(pricing: Pricing) -> Times:
    """Five heads of 75,600 tokens on one chip."""
    attend = jax_splash((3024, 2048, 1024))
    queries, keys = (jax.ShapeDtypeStruct((5, rows, 128), jnp.bfloat16) for rows in (25 * 3024, 37 * 2048))
    mesh = pricing.mesh(x=1)
    return pricing.cost(mesh, (attend, _on(mesh, (queries, keys, keys)))).total


def all_to_alls(pricing: Pricing) -> Times:
    """Four of 96.8 MB a chip over eight chips: heads are exchanged for tokens, and back; without the copies around."""
    mesh = pricing.mesh(x=8)

    def exchange(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (jax.lax.all_to_all(x, "x", 0, 1, tiled=True) for x in (q, k, v))
        return jax.lax.all_to_all(q + k + v, "x", 1, 0, tiled=True)

    by_token = P(None, "x")
    shape = jax.ShapeDtypeStruct((40, 75_600, 128), jnp.bfloat16, sharding=NamedSharding(mesh, by_token))
    sharded = jax.shard_map(exchange, mesh=mesh, in_specs=(by_token,) * 3, out_specs=by_token, check_vma=False)
    return pricing.cost(mesh, (sharded, (shape,) * 3)).by_category()["collectives"]


def wan_step(attention: Attention) -> Callable[[Pricing], Times]:
    """Wan 2.1 14B T2V, 720x1280, 81 frames, guided, dp 2 x tp 4."""

    def predict(pricing: Pricing) -> Times:
        from diffusers import WanTransformer3DModel

        from wan_tpu.families.wan.presets import TRANSFORMER_14B

        mesh = pricing.mesh(dp=2, tp=4)
        inputs = {
            "hidden_states": _by_branch(mesh, 2, 16, 21, 90, 160),
            "timestep": _by_branch(mesh, 2, dtype="float32"),
            "encoder_hidden_states": _by_branch(mesh, 2, 226, 4096),
        }

        def of(layers: int) -> Program:
            module = _on_meta(WanTransformer3DModel, TRANSFORMER_14B | {"num_layers": layers})
            return step(module, WAN, mesh, inputs, attention)

        return pricing.step(40, of, mesh)

    return predict


def cogvideox_step(height: int, width: int, frames: int, attention: Attention) -> Callable[[Pricing], Times]:
    """CogVideoX 1.5 5B, guided, dp 2 x tp 4."""

    def predict(pricing: Pricing) -> Times:
        from diffusers import CogVideoXTransformer3DModel

        from wan_tpu.families.cogvideox.presets import TRANSFORMER_15

        mesh = pricing.mesh(dp=2, tp=4)
        latent_frames = (frames - 1) // 4 + 1
        latent_frames += latent_frames % 2
        tokens = latent_frames // 2 * (height // 16) * (width // 16)
        table = jax.ShapeDtypeStruct((tokens, 64), "float32", sharding=NamedSharding(mesh, P()))
        inputs = {
            "hidden_states": _by_branch(mesh, 2, latent_frames, 16, height // 8, width // 8),
            "timestep": _by_branch(mesh, 2, dtype="int32"),
            "encoder_hidden_states": _by_branch(mesh, 2, 226, 4096),
            "image_rotary_emb": (table, table),
        }

        def of(layers: int) -> Program:
            module = _on_meta(CogVideoXTransformer3DModel, TRANSFORMER_15 | {"num_layers": layers})
            return step(module, COGVIDEOX, mesh, inputs, attention)

        return pricing.step(42, of, mesh)

    return predict


def hunyuan_step(attention: Attention) -> Callable[[Pricing], Times]:
    """HunyuanVideo-1.5 T2V, 720x1280, 121 frames, guided, tp 8."""

    def predict(pricing: Pricing) -> Times:
        from diffusers import HunyuanVideo15Transformer3DModel

        from wan_tpu.families.hunyuan15.presets import GLYPH_TOKENS, PRESETS, TEXT_TOKENS

        config = PRESETS["hunyuanvideo1.5-720p-t2v"].transformer
        mesh = pricing.mesh(dp=1, tp=8)
        texts = TEXT_TOKENS + GLYPH_TOKENS
        inputs = {
            "hidden_states": _by_branch(mesh, 2, 65, 31, 45, 80),
            "timestep": _by_branch(mesh, 2, dtype="float32"),
            "context": _by_branch(mesh, 2, texts, config["num_attention_heads"] * config["attention_head_dim"]),
            "mask": _by_branch(mesh, 2, texts, dtype="bool"),
        }

        def of(layers: int) -> Program:
            module = _on_meta(HunyuanVideo15Transformer3DModel, config | {"num_layers": layers})
            return step(module, HUNYUAN, mesh, inputs, attention, hunyuan)

        return pricing.step(config["num_layers"], of, mesh)

    return predict


def maxdiffusion(checkout: Path, setting: Setting) -> Callable[[Pricing], Cost]:
    """Wan 2.2 A14B, 720x1280, 81 frames, guided, data 2 x context 4."""

    @functools.cache
    def cost(pricing: Pricing) -> Cost:
        mesh = pricing.jax_mesh(data=2, fsdp=1, context=4, tensor=1)
        program = maxdiffusion_steps.step(checkout, mesh, setting)
        flags = maxdiffusion_steps.flags(checkout)
        # Where a head's bound on its logits can't be proven safe another kernel runs: of all heads it is taken to be.
        return pricing.cost(mesh, program, legacy=True, flags=flags, prefer=("branch_1",))

    return cost


def ring_hop(cost: Callable[[Pricing], Cost]) -> Callable[[Pricing], Times]:
    """Half of the queries with half of the keys, of half the heads: the kernel of a step that takes longest."""

    def predict(pricing: Pricing) -> Times:
        hop = max((item for item in cost(pricing).items if item.kernel), key=lambda item: item.seconds.floor)
        return hop.seconds * (1 / hop.executions)

    return predict


def rows(pedia: Path | None, peer: Path | None) -> Iterator[Row]:
    """Yield what can be predicted here.

    pedia, peer  checkouts of gpu-tpu-pedia and of maxdiffusion
    """
    yield from torchax_rows(pedia)
    if peer is not None:
        yield from maxdiffusion_rows(peer)


def maxdiffusion_rows(checkout: Path) -> Iterator[Row]:
    """Yield what was published of maxdiffusion: kernels and steps."""
    ring = {"block_q": 6400, "block_kv": 2048, "block_kv_compute": 2048, "block_kv_compute_in": 1024}
    plain = {"block_q": 9472, "block_kv": 1024, "block_kv_compute": 1024, "block_kv_compute_in": 1024}
    splash = {"block_q": 3024, "block_kv": 2048, "block_kv_compute": 1024, "block_q_dkv": 3024, "block_kv_dkv": 2048}
    splash |= {"block_kv_dkv_compute": 2048, "block_q_dq": 3024, "block_kv_dq": 2048}
    vmem = {"vmem_limit_bytes": 64 << 20}
    fixed = maxdiffusion(checkout, Setting("ulysses_ring_custom_fixed_m", ring | vmem, ulysses=2))
    online = maxdiffusion(checkout, Setting("ulysses_ring_custom", plain | vmem, ulysses=2))
    a14b = "Wan 2.2 A14B, a guided step"
    yield Row("a hop of ring attention, fixed shift", "v7x-4", (0.02115, 0.02115), f"{PEER}#452", ring_hop(fixed))
    yield Row("the same, online", "v7x-4", (0.02265, 0.02265), f"{PEER}#452", ring_hop(online))
    for what, kind, measured, source, cost in (
        ("ring of 2 x Ulysses of 2, fixed shift", "v7x-4", (2.633, 2.633), 452, fixed),
        ("ring of 2 x Ulysses of 2, online", "v7x-4", (2.733, 2.733), 452, online),
        (
            "Ulysses, fixed shift",
            "v6e-8",
            (3.41, 3.45),
            479,
            maxdiffusion(checkout, Setting("ulysses_custom_fixed_m", ring | vmem, uniform=True)),
        ),
        (
            "Ulysses, splash",
            "v6e-8",
            (6.29, 6.29),
            376,
            maxdiffusion(checkout, Setting("ulysses", splash, channels=36, config="base_wan_i2v_27b.yml")),
        ),
    ):
        yield Row(f"{a14b}, {what}", kind, measured, f"{PEER}#{source}", lambda pricing, cost=cost: cost(pricing).total)


def torchax_rows(pedia: Path | None) -> Iterator[Row]:
    """Yield what was published of torchax programs; without a checkout those with JAX's own kernel."""
    yield Row(
        "JAX's splash attention, 5 heads of 75,600", "v6e-1", (0.04393, 0.04393), f"{PROFILE}, 4.1", attention_alone
    )
    yield Row("four all-to-alls of a layer, 8 chips", "v6e-8", (0.0044, 0.0044), f"{PROFILE}, 6.2", all_to_alls)
    yield Row(
        "Wan 2.1 14B, a guided step, splash",
        "v6e-8",
        (5.3, 5.9),
        f"{PEDIA} tpu/Wan2.1/README.md",
        wan_step(Attention(jax_splash())),
    )
    hunyuan15 = "HunyuanVideo-1.5, 720x1280, 121 frames, a guided step"
    splash = Attention(jax_splash(HUNYUAN_SPLASH), HUNYUAN_SPLASH, centred=False)
    yield Row(
        f"{hunyuan15}, splash", "v6e-8", (7.29, 7.29), f"{PEDIA} tpu/HunyuanVideo-1.5/README.md", hunyuan_step(splash)
    )
    if pedia is None:
        return
    exp2 = Attention(exp2_splash(pedia, HUNYUAN_TILE), HUNYUAN_TILE, centred=False, by_token=True)
    yield Row(
        f"{hunyuan15}, exp2", "v6e-8", (5.81, 5.81), f"{PEDIA} tpu/HunyuanVideo-1.5/README.md", hunyuan_step(exp2)
    )
    attend = Attention(exp2_splash(pedia))
    yield Row(
        "Wan 2.1 14B, a guided step, exp2", "v6e-8", (4.59, 4.59), f"{PEDIA} tpu/Wan2.1/README.md", wan_step(attend)
    )
    # The second is published as of 81 frames, at 8 a second, where fewer pixels took 2.08 s: five seconds of 8 are 41.
    for height, width, frames, measured in ((720, 1280, 81, (2.08, 2.13)), (768, 1360, 41, (1.13, 1.13))):
        yield Row(
            f"CogVideoX 1.5 5B, {height}x{width}, {frames} frames, a guided step, exp2", "v6e-8", measured,
            f"{PEDIA} tpu/CogVideoX/README.md", cogvideox_step(height, width, frames, attend),
        )  # fmt: skip


def _on_meta(kind: Any, config: dict[str, Any]) -> torch.nn.Module:
    with torch.device("meta"):
        module: torch.nn.Module = kind.from_config(config)
    return module.to(torch.bfloat16).eval()


def _on(mesh: Mesh, shapes: Any) -> Any:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, P())), shapes
    )


def _by_branch(mesh: Mesh, *shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("dp")))
