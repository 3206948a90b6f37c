"""The small model's sizes, and how it is trained and sampled: every number that training and gate share."""

from dataclasses import dataclass
from typing import Any

from wan_tpu.families.wan.published import TRANSFORMER_14B_I2V_22, UMT5_XXL, VAE_21

Z = 16  # Latent channels, as many as Wan's.
TEXT_TOKENS = 512  # The pipelines pad prompts to this length.
BOUNDARY, SHIFT = 0.9, 5.0  # Those of Wan 2.2 I2V A14B.
STEPS, GUIDANCE = 20, 3.0

# Pixels are grouped in patches of 2 x 2, as in Wan 2.2's VAE, so that no layer works at full resolution: such layers
# would take most of the time and learn the least.
VAE: dict[str, Any] = VAE_21 | {
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "base_dim": 16,
    "dim_mult": [1, 2, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [True, True],
    "scale_factor_spatial": 8,
    "scale_factor_temporal": 4,
}
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

    Attributes:
        steps: All steps.
        batch: Clips in a step.
        muon_rate, adam_rate: Peaks of the learning rates, which rise over `warm_up` steps and fall as a cosine to a
            fiftieth.
        ema: Decay of the averaged weights, which are the final result.
        save_every: Steps between two states that are saved.
        sheet_every: Steps between two contact sheets; 0 for none.
    """

    steps: int
    batch: int
    muon_rate: float = 0.02
    adam_rate: float = 2e-3
    warm_up: int = 100
    ema: float = 0.999
    save_every: int = 500
    sheet_every: int = 2000


VAE_SCHEDULE = Schedule(steps=2500, batch=4, ema=0.995, sheet_every=500)
EXPERTS_SCHEDULE = Schedule(steps=8000, batch=32, ema=0.999, sheet_every=2000)
SCENES = 4000  # Each has its opposite, so there are 8,000 clips.
FIRST_LOGVAR = -6.0  # The log variance of the untrained VAE's latents.
KL_WEIGHT = 1e-4
TEXT_DROPOUT = 0.12
