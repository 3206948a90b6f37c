"""The transformer of an LTX-2 model: how it is built, adapted, scanned and sharded."""

from diffusers import LTX2VideoTransformer3DModel

from wan_tpu.families.ltx2 import sharding
from wan_tpu.families.ltx2.config import Ltx2Config
from wan_tpu.families.ltx2.connectors import ADAPTED_BY
from wan_tpu.families.ltx2.in_context import describe_doubt
from wan_tpu.runtime.components import Component

# The names in the model's own files, from github.com/Lightricks/LTX-2, ltx_core/model/transformer/model.py. They differ
# outside attention's and the feed-forward's projections alone.
_ORIGINALS = (
    (r"^(audio_)?proj_in\.", r"\1patchify_proj."),
    (r"^(audio_)?time_embed\.", r"\1adaln_single."),
    (r"^(audio_)?prompt_adaln\.", r"\1prompt_adaln_single."),
    (r"^av_cross_attn_(video|audio)_scale_shift\.", r"av_ca_\1_scale_shift_adaln_single."),
    (r"^av_cross_attn_video_a2v_gate\.", "av_ca_a2v_gate_adaln_single."),
    (r"^av_cross_attn_audio_v2a_gate\.", "av_ca_v2a_gate_adaln_single."),
    (r"\.(video|audio)_a2v_cross_attn_scale_shift_table$", r".scale_shift_table_a2v_ca_\1"),
    (r"\.norm_([qk])\.", r".\1_norm."),
)


def transformer(config: Ltx2Config) -> Component:
    """Return the transformer, with its pairs of channels for RoPE in the order of our kernels."""
    return Component(
        folder="transformer",
        build=lambda: LTX2VideoTransformer3DModel.from_config(config.transformer),
        adapt=lambda module, mesh: None,
        scanned=("transformer_blocks",),
        rules=sharding.RULES,
        matrices=sharding.MATRICES,
        originals=_ORIGINALS,
        adapted_beside=ADAPTED_BY,
        describe_adapter=describe_doubt,
    )
