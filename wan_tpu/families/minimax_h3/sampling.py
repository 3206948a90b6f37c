"""Presets of MiniMax-H3 with few steps, by adapters that were distilled for them, and those of FastVideo's FastH3.

LightX2V trained its Turbo at 1344x768 with Euler's method, at shift 6 for the video and 3, the model's own, for the
sound: github.com/ModelTC/Minimax-H3-Turbo, and github.com/ModelTC/LightX2V, configs/minimax_h3/dmd. FastVideo trained
FastH3 from text alone, without keyframes, at the model's own shifts, with a highest noise level below one
(`dmd_denoising_steps` of its fastvideo_inference.json are thousandths). Of its adapters one has dense attention; three
have video sparse attention, and hold its gates. LightX2V publishes its adapter with sparse attention for 362 frames and
RTX 5090, whose blocks are of 128 queries and 64 keys, and which keeps 15 %: configs/minimax_h3/dmd/*_sla.json and
common/ops/attn/dynamic_sparse_attn.py at f8aee98. Its adapters for references were trained at the model's own shifts:
configs/minimax_h3/dmd/minimax_h3_ref2av_4step.json at 221f1ba, and for eight steps the notes of their release, where
vLLM-Omni has 6.
"""

from collections.abc import Iterable

from wan_tpu.families.minimax_h3.fasth3 import V1, FastH3
from wan_tpu.families.minimax_h3.published import PUBLISHED
from wan_tpu.request import Preset
from wan_tpu.requested_adapter import RequestedAdapter


def shift_levels(levels: Iterable[float], shift: float) -> tuple[float, ...]:
    """Return noise levels with a shift."""
    return tuple(shift * level / (1 + (shift - 1) * level) for level in levels)


def list_fasth3_presets(fasth3: FastH3, shift: float) -> dict[str, Preset]:
    """Return the presets of one of FastVideo's transformers, with the video's shift."""
    about, source = f"the model's own steps for {_TRIAL}", "https://huggingface.co/FastVideo"
    return {FASTH3_IMAGES: Preset(about, source, (("sigmas", shift_levels(fasth3.levels, shift)), ("shift", shift)))}


def _distil(summary: str, adapter: str, levels: tuple[float, ...], shift: float, **only: bool) -> Preset:
    """Return a preset with noise levels, as they are before the shift. `only` says what requests it is for."""
    settings = {
        "sigmas": shift_levels(levels, shift),
        "shift": shift,
        "loras": (RequestedAdapter(f"{adapter}.safetensors"),),
    }
    source = "https://huggingface.co/" + "/".join(adapter.split("/")[:2])
    text = f"{summary}, by an adapter that was distilled for them; not what the model itself makes"
    return Preset(text, source, tuple(settings.items()), **only)


_TURBO, _FILE = "lightx2v/Minimax-h3-Turbo", "minimax_h3_fl2v_turbo"
_FASTH3 = "FastVideo/FastVideo-FastH3-4-step-Preview-v1-LoRA/{}/adapter_model"
_DENSE, _SPARSE = (_FASTH3.format(variant) for variant in ("dense-datafree", "vsa-datafree"))
_TRIAL = "first and last frames, with which it was not distilled"
_FOUR = (1.0, 0.75, 0.5, 0.25)
_EIGHT = tuple(level / 8 for level in range(8, 0, -1))
_SHIFT = PUBLISHED["minimax-h3"].scheduler["shift"]
FEW_STEP_PRESETS = {
    "minimax-h3": {
        "turbo-4": _distil("four steps", f"{_TURBO}/{_FILE}_4step_v1.2_768p_bf16", _FOUR, 6.0),
        "turbo-8": _distil("eight steps", f"{_TURBO}/{_FILE}_8step_v1.0_768p_bf16", _EIGHT, 6.0),
        "turbo-4-references": _distil(
            "four steps with references",
            f"{_TURBO}/minimax_h3_ref2v_turbo_4step_v0.1_bf16",
            _FOUR,
            _SHIFT,
            with_references=True,
        ),
        "turbo-8-references": _distil(
            "eight steps with references",
            f"{_TURBO}/minimax_h3_ref2v_turbo_8step_v1.0_768p_bf16",
            _EIGHT,
            _SHIFT,
            with_references=True,
        ),
        "turbo-4-sla": _distil(
            "four steps with sparse attention", f"{_TURBO}-SLA/{_FILE}_4step_v0.1_768p_sla_bf16", _FOUR, 6.0
        ),
        "fasth3": _distil("four steps from text", _DENSE, V1.levels, _SHIFT, text_only=True),
        "fasth3-vsa": _distil(
            "four steps from text with video sparse attention", _SPARSE, V1.levels, _SHIFT, text_only=True
        ),
        "fasth3-vsa-images": _distil(f"the steps of fasth3-vsa for {_TRIAL},", _SPARSE, V1.levels, _SHIFT),
    },
}
FASTH3_IMAGES = "images"
# The share of the blocks of keys that a preset's adapter was trained with.
DENSITIES = {"turbo-4-sla": 1 - 0.85}
# The share of the video's tiles that a preset's adapter was trained without.
SPARSITIES = dict.fromkeys(("fasth3-vsa", "fasth3-vsa-images"), V1.sparsity)
