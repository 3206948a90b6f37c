"""How large the small model is, how it is trained and sampled. Every number that training and gate share is here."""

from dataclasses import dataclass
from typing import Any

from wan_tpu.families.wan_presets import TRANSFORMER_14B_I2V_22, UMT5_XXL, VAE_21

Z = 16  # latent channels, as Wan's
TEXT_TOKENS = 512  # a constant of the pipelines
BOUNDARY, SHIFT = 0.9, 5.0  # Wan 2.2 I2V A14B's
STEPS, GUIDANCE = 20, 3.0

# 8 channels at full resolution: that level costs most of the time and holds least of what is learned.
VAE: dict[str, Any] = VAE_21 | {"base_dim": 8, "dim_mult": [1, 2, 4, 8], "num_res_blocks": 1}
_TEXT_WIDTH = 128
TRANSFORMER: dict[str, Any] = TRANSFORMER_14B_I2V_22 | {
    "num_attention_heads": 4,
    "attention_head_dim": 48,
    "text_dim": _TEXT_WIDTH,
    "freq_dim": 128,
    "ffn_dim": 512,
    "num_layers": 6,
}
TEXT_ENCODER: dict[str, Any] = UMT5_XXL | {
    "d_model": _TEXT_WIDTH,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}


@dataclass(frozen=True)
class Schedule:
    """One stage's training.

    steps      in all
    batch      clips a step
    rate       the learning rate's peak; it rises over `warm_up` steps and falls as a cosine to a twentieth
    ema        decay of the averaged weights that are kept in the end
    save_every, sheet_every  steps; no sheets when 0
    """

    steps: int
    batch: int
    rate: float
    warm_up: int = 200
    ema: float = 0.999
    save_every: int = 500
    sheet_every: int = 2000


VAE_SCHEDULE = Schedule(steps=8000, batch=4, rate=2e-3, ema=0.998)
EXPERTS_SCHEDULE = Schedule(steps=16000, batch=32, rate=1e-3, ema=0.9995)
SCENES = 4000  # each with its opposite: 8,000 clips
SHORT_SHARE = 0.8  # of the VAE's steps are on pieces of 32 x 32 pixels and 9 frames, an eighth of a clip's cost
KL_WEIGHT = 1e-4
TEXT_DROPOUT = 0.12
