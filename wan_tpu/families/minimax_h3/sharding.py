"""The sharding of a MiniMax-H3 transformer's weights."""

from wan_tpu.runtime.mesh import AXES, Rule

_BLOCK = r"transformer_blocks\..*\."
# Split by outputs, and gathered before they are used. Along 'sp' are copies, so that a mesh can have two groups of
# devices that exchange heads, each with more of the matrices than a group of all would have.
_LINEAR = rf"{_BLOCK}(attn\.(to_q|to_k|to_v|to_gate_compress|to_out\.0)|ff\.net\.(0\.proj|2))\.weight"
# Of the modulations, two fifths of the model, the results are gathered: they are split over all devices, as is what
# runs once a request for the text. Of its attention and feed-forward, heads and hidden units are split, and the results
# are summed.
_REFINER = r"token_refiner\.refiner_blocks\..*\."
_OUTPUTS = (
    rf"({_BLOCK}adaln_proj\.linear|norm_out\.linear|context_embedder"
    rf"|{_REFINER}(attn\.(to_q|to_k|to_v)|ff\.net\.0\.proj))\.weight"
)
_SUMS = rf"{_REFINER}(attn\.to_out\.0|ff\.net\.2)\.weight"
MATRICES = _LINEAR
RULES = (
    Rule(_LINEAR, ("tp", None)),
    Rule(_OUTPUTS, (AXES, None)),
    Rule(_SUMS, (None, AXES)),
    Rule(rf"(?!({_LINEAR}|{_OUTPUTS}|{_SUMS})$).*", ()),
)
