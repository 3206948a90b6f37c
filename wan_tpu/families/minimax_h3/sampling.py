"""Presets of MiniMax-H3 with few steps, by adapters that were distilled for them.

LightX2V trained its Turbo at 1344x768 with Euler's method, at shift 6 for the video and 3, the model's own, for the
sound: github.com/ModelTC/Minimax-H3-Turbo, and github.com/ModelTC/LightX2V, configs/minimax_h3/dmd. FastVideo trained
FastH3 from text alone, without keyframes, at the model's own shifts, with a highest noise level below one
(`dmd_denoising_steps` of its fastvideo_inference.json are thousandths); of its adapters this is the one with dense
attention. LightX2V's adapter with sparse attention was trained on 362 frames, with blocks of 128 queries and 64 keys of
which 15 % are kept: configs/minimax_h3/dmd/*_sla.json and common/ops/attn/dynamic_sparse_attn.py at f8aee98.
"""

from wan_tpu.families.minimax_h3.published import PUBLISHED
from wan_tpu.request import Preset
from wan_tpu.requested_adapter import RequestedAdapter


def _distil(summary: str, adapter: str, levels: tuple[float, ...], shift: float, *, text_only: bool = False) -> Preset:
    """Return a preset with noise levels, as they are before the shift."""
    settings = {
        "sigmas": tuple(shift * level / (1 + (shift - 1) * level) for level in levels),
        "shift": shift,
        "loras": (RequestedAdapter(f"{adapter}.safetensors"),),
    }
    source = "https://huggingface.co/" + "/".join(adapter.split("/")[:2])
    text = f"{summary}, by an adapter that was distilled for them; not what the model itself makes"
    return Preset(text, source, tuple(settings.items()), text_only)


_TURBO, _FILE = "lightx2v/Minimax-h3-Turbo", "minimax_h3_fl2v_turbo"
_FASTH3 = "FastVideo/FastVideo-FastH3-4-step-Preview-v1-LoRA/dense-datafree/adapter_model"
_FOUR = (1.0, 0.75, 0.5, 0.25)
_SHIFT = PUBLISHED["minimax-h3"].scheduler["shift"]
FEW_STEP_PRESETS = {
    "minimax-h3": {
        "turbo-4": _distil("four steps", f"{_TURBO}/{_FILE}_4step_v1.2_768p_bf16", _FOUR, 6.0),
        "turbo-8": _distil(
            "eight steps", f"{_TURBO}/{_FILE}_8step_v1.0_768p_bf16", tuple(level / 8 for level in range(8, 0, -1)), 6.0
        ),
        "turbo-4-sla": _distil(
            "four steps with sparse attention", f"{_TURBO}-SLA/{_FILE}_4step_v0.1_768p_sla_bf16", _FOUR, 6.0
        ),
        "fasth3": _distil("four steps from text", _FASTH3, (0.999, 0.749, 0.5, 0.25), _SHIFT, text_only=True),
    },
}
# The share of the blocks of keys that a preset's adapter was trained with.
DENSITIES = {"turbo-4-sla": 1 - 0.85}
