"""The duration head of LTX-2.5, which reads from an encoded prompt how long its video should be.

The arithmetic is that of LTX2DurationHead in diffusers 0.42.1 (pipelines/ltx2/duration_head.py), in float32.

Shapes: B batch, L tokens, C channels, N heads.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from diffusers.pipelines.ltx2.duration_head import LTX2DurationHead

from wan_tpu.errors import CheckpointError
from wan_tpu.families.ltx2.connectors import STREAMS
from wan_tpu.families.shared.layers import in_float32
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.components import Component, Loaded
from wan_tpu.runtime.mesh import Rule

_QUERIES = "attention_pooler.query_tokens"


def duration_head(config: Mapping[str, Any], widths: Mapping[str, int]) -> Component:
    """Return the duration head, which every device has whole (1.8 M parameters).

    Args:
        config: Its settings.
        widths: The channels of the text for "video" and for "audio".

    Raises:
        CheckpointError: It doesn't fit the connectors.
    """
    for stream in STREAMS:
        key = f"{stream}_cross_attention_dim"
        if config[key] != widths[stream]:
            raise CheckpointError(
                f"duration_head/config.json has {key} {config[key]}; with these connectors it must be {widths[stream]}"
            )
    return Component(
        folder="duration_head",
        build=lambda: LTX2DurationHead.from_config(dict(config)),
        adapt=lambda module, mesh: None,
        scanned=(),
        rules=(Rule(".*", ()),),
    )


def predict_seconds(head: Loaded, text: Mapping[str, jax.Array]) -> jax.Array:
    """Return the seconds of a prompt's video, float32 [B].

    Args:
        head: From `duration_head`.
        text: The connectors' "text" for video and "audio_text", [B, L, C].
    """
    params = {name: value.astype(jnp.float32) for name, value in head.params.items()}
    with in_float32():
        return _predict_seconds(head.module.config["num_pooler_heads"], params, text)


def _predict_seconds(heads: int, params: Params, text: Mapping[str, jax.Array]) -> jax.Array:
    tokens = jnp.concatenate(
        [
            _project(params, f"{stream}_input_proj", text[name]) + params[f"{stream}_modality_emb"]
            for stream, name in zip(STREAMS, ("text", "audio_text"), strict=True)
        ],
        axis=1,
    )
    queries = jnp.broadcast_to(params[_QUERIES], (len(tokens), *params[_QUERIES].shape))
    query, key, value = (
        _project(params, f"attention_pooler.{name}", x).reshape(*x.shape[:2], heads, -1)
        for name, x in (("to_q", queries), ("to_k", tokens), ("to_v", tokens))
    )
    pooled = jax.nn.dot_product_attention(query, key, value).reshape(queries.shape)
    pooled = _project(params, "attention_pooler.to_out", pooled).reshape(len(tokens), -1)
    hidden = jax.nn.gelu(_project(params, "mlp_hidden", pooled), approximate=True)
    return jnp.exp(_project(params, "mlp_out", hidden)[:, 0])


def _project(params: Params, name: str, x: jax.Array) -> jax.Array:
    """Return a linear layer's output, float32."""
    product = jnp.einsum("...i,oi->...o", x.astype(jnp.float32), params[f"{name}.weight"])
    return product + params[f"{name}.bias"]
