"""What the header of an adapter's file asks for without getting it."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from wan_tpu.errors import InvalidRequest

# Keys of adapters that were trained with a reference: how it was scaled, by training_strategies/flexible.py of
# ltx-trainer at 400fd310; the same with ss_, and which kind of reference it was, by musubi-tuner's fork for LTX-2
# (get_checkpoint_metadata); how several are told apart, by adapters with a slot embedding.
_OF_REFERENCES = re.compile(
    r"(ss_)?reference_(downscale|spatial_scale|temporal_scale)_factor|ss_ic_lora_strategy|ss_(v2v|av_ic)_training"
    r"|reference_(token_order|slot_\w+)"
)
_NO_REFERENCE = ("", "none", "false")
# Keys of what a program does with the adapter. Trainers' own settings begin with ss_ or modelspec.
_WISHES = re.compile(r"(?!ss_|modelspec)(.*reference.*|(.*[_.])?(scale_factor|lora_scale|scale|strength|multiplier))")
_NOTHING = ("", "0", "1", "1.0", "none", "null", "false", "[]")
_ALPHAS = ("alpha", "lora_alpha", "network_alpha", "ss_network_alpha")


def list_unmet(metadata: Mapping[str, Any], applied: Collection[float]) -> Iterator[str]:
    """Yield what a header asks for that isn't done, as the rest of a sentence that begins with the adapter.

    Args:
        metadata: The header's entries.
        applied: The alphas that are applied; a pair without one has its rank.

    Raises:
        InvalidRequest: The adapter was trained with a reference, without which it is another adapter.
    """
    for key, value in metadata.items():
        text = str(value).strip()
        if _OF_REFERENCES.fullmatch(key.lower()) and text.lower() not in _NO_REFERENCE:
            raise InvalidRequest(
                f"an adapter's header has {key} {text[:40]}: it is an in-context adapter (IC-LoRA), trained with a "
                "reference video or sound, which requests can't have; leave it out",
                "loras",
            )
        if _WISHES.fullmatch(key.lower()) and text.lower() not in _NOTHING:
            yield f"asks for {key} {text[:40]} in its header, which has no effect here"
    for key in _ALPHAS:
        try:
            stated = float(metadata[key])
        except (KeyError, OverflowError, TypeError, ValueError):
            continue
        if applied and math.isfinite(stated) and not any(math.isclose(stated, alpha) for alpha in applied):
            used = " or ".join(f"{alpha:g}" for alpha in sorted(applied)[:3])
            yield f"has {key} {stated:g} in its header, but {used} is applied as alpha; if need be, scale the adapter"
