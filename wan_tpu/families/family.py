"""The registration of a model family, `FAMILY` in its folder. Every process reads it, so it imports no JAX or torch."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """A folder of `wan_tpu/families/`."""

    name: str
    title: str
    transformer: str  # The class of its checkpoints' transformer, by which checkpoints are recognised.
    published: Mapping[str, Any]  # The published models' configurations, by name.
    # Where the published models are on the Hugging Face hub, by name, as diffusers' checkpoints.
    hub_ids: Mapping[str, str]
    spec: type[Any]  # The `ModelSpec`'s class, which takes a configuration, or with `open` a checkpoint.
    model: str  # "module:class" of its `wan_tpu.families.model.Model`, which needs JAX and torch.
    small: str  # "module:function" that writes small checkpoints (`wan_tpu.tiny`), which needs diffusers.
    # "module:class" of a checkpoint whose experts are replaced by files of another format. It takes (source, files, the
    # attention density of sparse experts). None if the family has none.
    with_experts: str | None = None
    licence: str = ""  # The weights' licence in a sentence, if they aren't free of charge for everybody.
    display_name: str = ""  # The name that this licence asks user interfaces to show, if it asks for one.

    @property
    def example(self) -> str:
        """A hub id of one of its models."""
        return next(iter(self.hub_ids.values()))

    def part(self, path: str) -> Any:
        """Import and return the object at "module:name"."""
        module, _, name = path.partition(":")
        return getattr(importlib.import_module(module), name)
