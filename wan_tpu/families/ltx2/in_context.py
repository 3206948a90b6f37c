"""Tell in-context adapters of LTX-2 (IC-LoRA), which were trained with a reference video, from all others.

Files rarely say so: Lightricks' trainer writes how the reference was scaled, and nothing if it had the video's size
(training_strategies/flexible.py and video_to_video.py of ltx-trainer, github.com/Lightricks/LTX-2 at 400fd310). The
weights don't say so either: both kinds change the same layers. What headers say is in `wan_tpu.adapters.header`.
"""

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from wan_tpu.errors import InvalidRequest
from wan_tpu.requested_adapter import RequestedAdapter

_IN_CONTEXT = re.compile(r"(?<![a-z])ic[-_]?lora", re.IGNORECASE)  # As such adapters are named everywhere.
# Lightricks' names of its adapters without a reference, such as ltx-2.5-22b-distilled-lora-450-bf16.safetensors.
_PLAIN = re.compile(r"ltx-2[\d.]*-\d+b-(distilled-lora|lora-camera-control)", re.IGNORECASE)
_STATES_STRATEGY = "ss_lora_target_preset"  # musubi-tuner's fork for LTX-2 also writes a strategy, if there is one.


def refuse_by_name(adapter: RequestedAdapter) -> None:
    """Raise `InvalidRequest` for an adapter whose name says that it is in-context."""
    if _IN_CONTEXT.search(adapter.path):
        raise InvalidRequest(
            f"{adapter} is an in-context adapter (IC-LoRA) by its name, trained with a reference video, which requests "
            "can't have; leave it out",
            "loras",
        )


def describe_doubt(path: str, header: Mapping[str, Any]) -> str | None:
    """Return what is to be known of an adapter that may be in-context, as the rest of a sentence that begins with it.

    Args:
        path: The request's name for its file.
        header: The entries of the file's header.
    """
    if _PLAIN.match(PurePath(path).name) or _STATES_STRATEGY in header:
        return None
    return (
        "doesn't say by its name or header whether it is an in-context adapter (IC-LoRA), trained with a reference "
        "video, which requests can't have; leave it out if it is"
    )
