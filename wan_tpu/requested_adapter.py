"""An adapter (LoRA) as a request names it. Every process uses this module, so it imports no JAX and no torch."""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from wan_tpu.errors import InvalidRequest

# The experts of models with two, each by the end of its stage's name: by noise, or the second of LTX-2's two stages.
Which = Literal["high", "low", "refine", "both"]
SCALES = (-10.0, 10.0)  # Lowest and highest scale. Sliders are used at negative scales; few adapters are used beyond 2.
MOST = 8  # The largest number of adapters in a request.
FORM = f"PATH[:SCALE][@{'|'.join(get_args(Which))}]"
_TEXT = re.compile(r"(?P<path>.+?)(?::(?P<scale>[-+]?[0-9.]+(?:e[-+]?[0-9]+)?))?(?:@(?P<expert>\w+))?")


@dataclasses.dataclass(frozen=True)
class RequestedAdapter:
    """One adapter of a request.

    Attributes:
        path: A .safetensors file or a folder with one, here or in gs://, or OWNER/NAME[/FILE] of the Hugging Face hub.
        scale: Factor by which its changes of the weights are multiplied.
        expert: Which of two experts it changes: "high" (noise) or "low", or "refine", the second of two stages; or
            "both".

    Raises:
        InvalidRequest: A field is out of range.
    """

    path: str
    scale: float = 1.0
    expert: Which = "both"

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise InvalidRequest(f"an adapter's path is {self.path!r}; give a file, a folder or a hub id", "loras")
        lowest, highest = SCALES
        scale = self.scale
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
            raise InvalidRequest(f"the scale of {self.path} is {scale!r}; give a number, usually 0 to 1", "loras")
        if not lowest <= scale <= highest:
            nearest = min(max(scale, lowest), highest)
            raise InvalidRequest(
                f"the scale of {self.path} is {scale:g}; allowed: {lowest:g} to {highest:g}, nearest {nearest:g}",
                "loras",
            )
        object.__setattr__(self, "scale", float(scale))
        # Absolute, so that it means the same from every folder.
        if os.path.exists(self.path):
            object.__setattr__(self, "path", os.path.abspath(self.path))
        if self.expert not in get_args(Which):
            raise InvalidRequest(
                f"the expert of {self.path} is {self.expert!r}; choose one of {', '.join(get_args(Which))}", "loras"
            )

    def __str__(self) -> str:
        scale = "" if self.scale == 1 else f":{self.scale:g}"
        return f"{self.path}{scale}" + ("" if self.expert == "both" else f"@{self.expert}")

    def is_for(self, stage: str) -> bool:
        """Return whether it changes the expert of a stage. A model's only expert takes adapters for both."""
        return self.is_for_all or stage.rpartition("_")[2] == self.expert

    @property
    def is_for_all(self) -> bool:
        """Whether it changes every expert. Only such adapters may change how prompts are encoded."""
        return self.expert == "both"


def parse_adapter(adapter: object) -> RequestedAdapter:
    """Read an adapter from its text, as `FORM` has it, or its fields; raises `InvalidRequest`."""
    if isinstance(adapter, RequestedAdapter):
        return adapter
    if isinstance(adapter, str):
        match = _TEXT.fullmatch(adapter)
        if match is None:
            raise InvalidRequest(f"{adapter!r} isn't an adapter; give {FORM}", "loras")
        fields: dict[str, Any] = {name: value for name, value in match.groupdict().items() if value is not None}
        try:
            return RequestedAdapter(**fields | ({"scale": float(fields["scale"])} if "scale" in fields else {}))
        except ValueError:
            raise InvalidRequest(f"the scale of {adapter!r} isn't a number; give {FORM}", "loras") from None
    if isinstance(adapter, Mapping):
        known = {field.name for field in dataclasses.fields(RequestedAdapter)}
        if unknown := sorted(map(str, set(adapter) - known)):
            raise InvalidRequest(
                f"an adapter has the unknown field {', '.join(unknown)}; allowed: {', '.join(sorted(known))}", "loras"
            )
        if "path" not in adapter:
            raise InvalidRequest("an adapter has no path; give a file, a folder or a hub id", "loras")
        return RequestedAdapter(**adapter)
    raise InvalidRequest(f"an adapter is a {type(adapter).__name__}; give {FORM}", "loras")


def parse_adapters(adapters: object) -> tuple[RequestedAdapter, ...]:
    """Read a request's adapters; raises `InvalidRequest` for anything but a list of them."""
    if not isinstance(adapters, list | tuple):
        raise InvalidRequest(f"loras is a {type(adapters).__name__}; give a list of {FORM}", "loras")
    if len(adapters) > MOST:
        raise InvalidRequest(f"loras has {len(adapters)} adapters; allowed: at most {MOST}", "loras")
    return tuple(map(parse_adapter, adapters))
