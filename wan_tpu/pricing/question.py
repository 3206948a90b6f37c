"""What a shipped plan answers. This file needs no JAX."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan_tpu.request import GenerationRequest, ResolvedRequest

FOLDER = Path(__file__).with_name("shipped")  # Each file is a model's, each line a plan.
_ACTS_NOT = ("prompt", "negative_prompt", "seed")  # Fields that no program depends on.


@dataclass(frozen=True)
class Question:
    """What a plan answers."""

    slice: str  # Its name, such as v6e-8.
    dtype: str
    request: Mapping[str, Any]  # The fields that programs depend on, as far as they aren't open in an empty request.

    @classmethod
    def of(cls, slice_name: str, dtype: str, request: ResolvedRequest) -> "Question":
        """Return the question that a request asks."""
        return cls(slice_name, dtype, list_acting(request.to_json()))


def locate_plans(model: str) -> Path:
    """Return the file of a model's shipped plans, which few models have."""
    return FOLDER / f"{model}.jsonl"


def list_acting(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a resolved request's fields that programs depend on, as JSON values."""
    empty = _empty_fields()
    acting = {name: value for name, value in fields.items() if value != empty.get(name) and name not in _ACTS_NOT}
    values: dict[str, Any] = json.loads(json.dumps(acting))
    return values


@functools.cache
def _empty_fields() -> dict[str, Any]:
    return GenerationRequest().to_json()
