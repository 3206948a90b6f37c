"""The types, limits and descriptions of the fields of `wan_tpu.request.GenerationRequest`, for people and programs."""

import dataclasses
import math
from collections.abc import Sequence
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from annotated_types import Ge, Le, MultipleOf
from pydantic.fields import FieldInfo

# The fields that every record and digest of a request has.
_FIRST_FIELDS = frozenset(
    [
        "prompt",
        "negative_prompt",
        "image",
        "last_image",
        "video",
        "strength",
        "height",
        "width",
        "frames",
        "fps",
        "steps",
        "guidance_scale",
        "guidance_scale_2",
        "shift",
        "seed",
        "solver",
        "loras",
        "sigmas",
        "switch_step",
        "cache",
        "preset",
    ]
)


def list_values(request: Any) -> dict[str, Any]:
    """Return a `GenerationRequest`'s values by field, for records and digests.

    A field that a later version added is left out while it has its default. So what an earlier version stored about
    the same request, such as snapshots and the results of a batch, still belongs to it.
    """
    values = {}
    for field in dataclasses.fields(request):
        value = getattr(request, field.name)
        default = field.default.default if isinstance(field.default, FieldInfo) else field.default
        if field.name in _FIRST_FIELDS or value != default:
            values[field.name] = value
    return values


def type_of(field: FieldInfo) -> Any:
    """Return the type of a field's values in JSON: int, float, bool, str or list[float]; None for any other."""
    types = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not NoneType]
    types = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in types]
    if types == [Sequence[float]]:
        return list[float]
    return types[0] if types in ([int], [bool], [str]) else float if types == [int, float] else None


def limits_of(field: FieldInfo) -> tuple[float, float] | None:
    """Return the lowest and the highest value of a field; None where it isn't a number."""
    lowest: list[Any] = [bound.ge for bound in field.metadata if isinstance(bound, Ge)]
    highest: list[Any] = [bound.le for bound in field.metadata if isinstance(bound, Le)]
    return (lowest[0], highest[0]) if lowest and highest else None


def describe(field: FieldInfo) -> str:
    """Return a field's description in one line."""
    return " ".join((field.description or "").split())


def explain_refusal(name: str, field: FieldInfo, value: object) -> str:
    """Explain why a field's value is refused: the value, what is allowed, and the nearest that works."""
    if type_of(field) is bool:
        return f"{name} is {value!r}; give true or false"
    limits = limits_of(field)
    if limits is None:
        empty = " (it may be empty)" if field.default == "" else ""
        return f"{name} is a {type(value).__name__}; give a string{empty}"
    kind, form, types = ("an integer", "d", int) if type_of(field) is int else ("a finite number", "g", int | float)
    lowest, highest = (format(bound, form) for bound in limits)
    if isinstance(value, bool) or not isinstance(value, types) or not -math.inf < value < math.inf:
        return f"{name} is {value!r}; give {kind} from {lowest} to {highest}"
    nearest = min(max(value, limits[0]), limits[1])
    if nearest != value:
        return f"{name} is {value:{form}}; allowed: {lowest} to {highest}, nearest {nearest:{form}}"
    multiple: Any = next(step.multiple_of for step in field.metadata if isinstance(step, MultipleOf))
    nearest = round(value / multiple) * multiple
    return f"{name} is {value}; it must be a multiple of {multiple}, nearest {nearest}"
