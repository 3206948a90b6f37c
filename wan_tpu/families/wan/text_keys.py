"""The keys and values of a Wan expert's cross-attention, which are computed once per request.

Shapes: B branches of guidance, L tokens, C channels, I channels of the embeddings.
"""

from typing import Any

import jax
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wan_tpu.families.shared.layers import linear
from wan_tpu.ops.dispatch import ops_for
from wan_tpu.runtime.bridge import Params, call, to_jax
from wan_tpu.runtime.mesh import token_layout

# "key" and "value" [depth, B, 512, C]; also "image_key" and "image_value", with 257 tokens.
TextKeys = dict[str, jax.Array]


def text_keys(
    module: torch.nn.Module,
    params: Params,
    mesh: Mesh,
    encoder_hidden_states: jax.Array,
    encoder_hidden_states_image: jax.Array | None,
) -> TextKeys:
    """Return every layer's cross-attention keys and values.

    Args:
        encoder_hidden_states: [B, 512, I], embeddings of the prompts.
        encoder_hidden_states_image: [1, 257, I], CLIP features, the same for every branch.
    """

    def method(module: Any, text: torch.Tensor, image: torch.Tensor | None) -> TextKeys:
        embedder, ops, eps = module.condition_embedder, ops_for("cpu"), module.config.eps
        text = to_jax(embedder.text_embedder(text))
        image = None if image is None else to_jax(embedder.image_embedder(image))

        def project(hidden_states: jax.Array, weights: Params, key: str, value: str, norm: str) -> list[jax.Array]:
            flat = hidden_states.reshape(-1, hidden_states.shape[-1])
            keys = linear(ops, weights, key, flat)
            keys = ops.rms_norm_rope(keys, weights[f"{norm}.weight"], None, eps=eps)
            values = linear(ops, weights, value, flat)
            return [x.reshape(*hidden_states.shape[:2], -1) for x in (keys, values)]

        def layer(_: None, weights: Params) -> tuple[None, TextKeys]:
            of_text = project(text, weights, "to_k", "to_v", "norm_k")
            arrays = dict(zip(("key", "value"), of_text, strict=True))
            if image is not None:
                of_image = project(image, weights, "add_k_proj", "add_v_proj", "norm_added_k")
                arrays |= dict(zip(("image_key", "image_value"), of_image, strict=True))
            return None, arrays

        return jax.lax.scan(layer, None, to_jax(dict(module.blocks.template.attn2.named_parameters())))[1]

    keys = call(module, params, method, encoder_hidden_states, encoder_hidden_states_image)
    return {
        name: jax.lax.with_sharding_constraint(value, key_sharding(mesh, name, encoder_hidden_states.shape[0]))
        for name, value in keys.items()
    }


def key_sharding(mesh: Mesh, name: str, branches: int) -> NamedSharding:
    """Return the sharding of keys or values [depth, B, L, C]: every device of a branch has a complete copy."""
    axis = None if name.startswith("image") else token_layout(mesh, branches, 1).branch_axis
    return NamedSharding(mesh, P(None, axis))
