"""The sharding of an LTX-2 transformer's weights."""

from wan_tpu.runtime.mesh import SHARDS, Rule

_BLOCK = r"transformer_blocks\..*\."
# Matrices of the video's stream, split by outputs, and gathered before they are used.
_VIDEO = (
    r"(attn1\.(to_q|to_k|to_v|to_out\.0)|attn2\.(to_q|to_out\.0)|audio_to_video_attn\.(to_q|to_out\.0)"
    r"|video_to_audio_attn\.(to_k|to_v)|ff\.net\.(0\.proj|2))"
)
# Matrices for the video's text, split by outputs. Outputs are gathered, not matrices, since a text has few tokens.
TEXT = r"attn2\.(to_k|to_v)"
# Matrices of the sound's stream, split by heads or hidden units: into them by outputs, out of them by inputs.
_HEADS = (
    r"(audio_attn1\.(to_q|to_k|to_v|to_gate_logits)|audio_attn2\.(to_q|to_k|to_v|to_gate_logits)"
    r"|audio_to_video_attn\.(to_k|to_v)|video_to_audio_attn\.(to_q|to_gate_logits)|audio_ff\.net\.0\.proj)"
)
_NORMS = r"(audio_attn[12]\.norm_[qk]|audio_to_video_attn\.norm_k|video_to_audio_attn\.norm_q)\.weight"
_SUMS = r"(audio_attn[12]\.to_out\.0|video_to_audio_attn\.to_out\.0|audio_ff\.net\.2)"
# The embeddings of timesteps, one for each use, and of LTX-2.0's text.
_EMBEDDINGS = r"(.*_embed|.*adaln|av_cross_attn_.*)\.linear\.weight"
MATRICES = rf"{_BLOCK}{_VIDEO}\.weight"
# Of a layer's matrices beside the video's, those that `linear` reads in place where each device has all weights.
IN_PLACE = rf"({TEXT}|(?!.*to_gate_logits){_HEADS}|{_SUMS})\.weight"
_SPLIT_ROWS = rf"({_BLOCK}({_VIDEO}|{TEXT})\.weight|{_EMBEDDINGS})"
RULES = (
    Rule(_SPLIT_ROWS, (SHARDS, None)),
    Rule(rf"{_BLOCK}{_HEADS}\.weight", ("tp", None)),
    Rule(rf"{_BLOCK}({_HEADS}\.bias|{_NORMS})", ("tp",)),
    Rule(rf"{_BLOCK}{_SUMS}\.weight", (None, "tp")),
    Rule(rf"(?!({_SPLIT_ROWS}|{_BLOCK}({_HEADS}\.(weight|bias)|{_NORMS}|{_SUMS}\.weight))$).*", ()),
)
