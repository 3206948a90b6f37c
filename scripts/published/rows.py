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
WAN_14B = "Wan 2.1 14B, 1280x720, 81 frames, a guided step"
A14B = "Wan 2.2 {}A14B, 1280x720, 81 frames, a guided step"
HUNYUAN_720P = "HunyuanVideo-1.5, 1280x720, 121 frames, a guided step"


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
    """Wan 2.1 14B T2V, 1280x720, 81 frames, guided, dp 2 x tp 4."""

    def predict(pricing: Pricing) -> Times:
        from diffusers import WanTransformer3DModel

        from wan_tpu.families.wan.published import TRANSFORMER_14B

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

        from wan_tpu.families.cogvideox.published import TRANSFORMER_15

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
    """HunyuanVideo-1.5 T2V, 1280x720, 121 frames, guided, tp 8."""

    def predict(pricing: Pricing) -> Times:
        from diffusers import HunyuanVideo15Transformer3DModel

        from wan_tpu.families.hunyuan15.published import GLYPH_TOKENS, PUBLISHED, TEXT_TOKENS

        config = PUBLISHED["hunyuanvideo1.5-720p-t2v"].transformer
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


def maxdiffusion(checkout: Path, setting: Setting, data: int = 2) -> Callable[[Pricing], Cost]:
    """Wan 2.2 A14B, 1280x720, 81 frames, guided, on eight devices: both branches are split over `data` of them."""

    @functools.cache
    def cost(pricing: Pricing) -> Cost:
        mesh = pricing.jax_mesh(data=data, fsdp=1, context=8 // data, tensor=1)
        program = maxdiffusion_steps.step(checkout, mesh, setting)
        flags = maxdiffusion_steps.flags(checkout)
        # A condition's true side: all heads go the shifted way, as the bound on their logits allows; else online.
        return pricing.cost(mesh, program, legacy=True, flags=flags, prefer=("branch_1",))

    return cost


def ring_hop(cost: Callable[[Pricing], Cost]) -> Callable[[Pricing], Times]:
    """Half of the queries with half of the keys, of half the heads: the kernel of a step that takes longest."""

    def predict(pricing: Pricing) -> Times:
        hop = max((item for item in cost(pricing).items if item.kernel), key=lambda item: item.seconds.floor)
        return hop.seconds * (1 / hop.executions)

    return predict


def total(cost: Callable[[Pricing], Cost]) -> Callable[[Pricing], Times]:
    """Return what a whole program takes."""
    return lambda pricing: cost(pricing).total


def rows(pedia: Path | None, peer: Path | None) -> Iterator[Row]:
    """Yield what can be predicted here.

    pedia, peer  checkouts of gpu-tpu-pedia and of maxdiffusion
    """
    yield from torchax_rows(pedia)
    if peer is not None:
        yield from maxdiffusion_rows(peer)


def maxdiffusion_rows(checkout: Path) -> Iterator[Row]:
    """Yield what was published of maxdiffusion: kernels and steps."""
    vmem = {"vmem_limit_bytes": 64 << 20}
    large = {"block_q": 6400, "block_kv": 2048, "block_kv_compute": 2048, "block_kv_compute_in": 1024} | vmem
    wide = {"block_q": 9472, "block_kv": 1024, "block_kv_compute": 1024, "block_kv_compute_in": 1024} | vmem
    splash = {"block_q": 3024, "block_kv": 2048, "block_kv_compute": 1024}
    splash |= {"block_q_dkv": 3024, "block_kv_dkv": 2048, "block_kv_dkv_compute": 2048}
    splash |= {"block_q_dq": 3024, "block_kv_dq": 2048}
    fixed = maxdiffusion(checkout, Setting("ulysses_ring_custom_fixed_m", large, ulysses=2))
    online = maxdiffusion(checkout, Setting("ulysses_ring_custom", wide, ulysses=2))
    narrow = {"block_q": 9472, "block_kv": 1024, "block_kv_compute": 512, "block_kv_compute_in": 512} | vmem
    pure = maxdiffusion(checkout, Setting("ulysses_custom_fixed_m", narrow, uniform=True))
    tall = {"block_q": 8448, "block_kv": 1024, "block_kv_compute": 1024, "block_kv_compute_in": 1024} | vmem
    over_eight = maxdiffusion(checkout, Setting("ulysses_custom_fixed_m", tall, uniform=True), data=1)
    of_image = Setting("ulysses", splash, channels=36, config="base_wan_i2v_27b.yml")

    all_fixed = "every head takes the fixed shift, which depends on the data"
    for variant, measured, cost, differs in (
        ("fixed shift", (0.02115, 2.633), fixed, (all_fixed,)),
        ("online", (0.02265, 2.733), online, ()),
    ):
        hop, step = measured
        source = f"{PEER}#452"
        yield Row(f"a hop of ring attention, {variant}", "v7x-4", (hop, hop), source, ring_hop(cost), differs)
        yield Row(
            f"{A14B.format('')}, ring 2 x Ulysses 2, {variant}", "v7x-4", (step, step), source, total(cost), differs
        )
    yield Row(
        f"{A14B.format('')}, Ulysses over 8, fixed shift", "v7x-4", (2.95,) * 2, f"{PEER}#436", total(over_eight),
        (all_fixed, "how many keys are multiplied at once isn't published", "flags are those published for a ring"),
    )  # fmt: skip
    yield Row(
        f"{A14B.format('')}, Ulysses, fixed shift", "v6e-8", (3.41, 3.45), f"{PEER}#479", total(pure),
        (all_fixed, f"{PEER} 7cfb8801, older than that pull request", "flags are those published for v7x"),
    )  # fmt: skip
    yield Row(
        f"{A14B.format('I2V ')}, Ulysses, splash", "v6e-8", (251.45 / 40,) * 2, f"{PEER}#376",
        total(maxdiffusion(checkout, of_image)),
        ("published as 251.45 s a run of 40 steps, with all that isn't a step", f"{PEER} 7cfb8801, four months newer"),
    )  # fmt: skip


def torchax_rows(pedia: Path | None) -> Iterator[Row]:
    """Yield what was published of torchax programs; without a checkout those with JAX's own kernel."""
    guide = f"{PEDIA} tpu/Wan2.2/docs/wan_tpu_optimization_guide.md"
    wan, hunyuan15, cogvideox = (
        f"{PEDIA} tpu/{name}/README.md" for name in ("Wan2.1", "HunyuanVideo-1.5", "CogVideoX")
    )
    line = "two and four layers are compiled, all others follow in a straight line"
    unsaid = "which attention kernel it was isn't said"
    diffusers = "diffusers' transformer in place of Tencent's; the texts' own embedders are left out"

    yield Row("JAX's splash attention, 5 heads of 75,600", "v6e-1", (0.04393,) * 2, f"{guide}, 4.1", attention_alone)
    yield Row("four all-to-alls of a layer, 8 chips", "v6e-8", (0.0044,) * 2, f"{guide}, 6.2", all_to_alls)
    yield Row(
        f"{WAN_14B}, splash", "v6e-8", (5.3, 5.9), wan, wan_step(Attention(jax_splash())), (line, unsaid)
    )  # fmt: skip
    attention = Attention(jax_splash(HUNYUAN_SPLASH), HUNYUAN_SPLASH, centred=False)
    yield Row(
        f"{HUNYUAN_720P}, splash", "v6e-8", (7.29,) * 2, hunyuan15, hunyuan_step(attention),
        (line, diffusers, "512 keys at once, not 1,024"),
    )  # fmt: skip
    if pedia is None:
        return
    attention = Attention(exp2_splash(pedia, HUNYUAN_TILE), HUNYUAN_TILE, centred=False, by_token=True)
    yield Row(
        f"{HUNYUAN_720P}, exp2", "v6e-8", (5.81,) * 2, hunyuan15, hunyuan_step(attention), (line, diffusers)
    )  # fmt: skip
    attention = Attention(exp2_splash(pedia))
    yield Row(f"{WAN_14B}, exp2", "v6e-8", (4.59,) * 2, wan, wan_step(attention), (line,))
    whole = "of the MLP the first matrix is whole on every chip: the rule given there names another"
    yield Row(
        "CogVideoX 1.5 5B, 1280x720, 81 frames, a guided step, exp2", "v6e-8", (2.08, 2.13), cogvideox,
        cogvideox_step(720, 1280, 81, attention), (line, whole),
    )  # fmt: skip
    frames = "published as 81 frames at 8 a second; fewer pixels took 2.08 s, and five seconds of 8 are 41"
    yield Row(
        "CogVideoX 1.5 5B, 1360x768, 41 frames, a guided step, exp2", "v6e-8", (1.13,) * 2, cogvideox,
        cogvideox_step(768, 1360, 41, attention), (line, whole, frames),
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
