"""The registration of a model family, `FAMILY` in its folder. Every process reads it, so it imports no JAX or torch."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """A folder of `wan_tpu/families/`.

    Attributes:
        name: The folder's name.
        title: The name shown to people.
        transformer: The class of its checkpoints' transformer, by which checkpoints are recognised.
        published: The published models' configurations, by name.
        hub_ids: Where the published models are on the Hugging Face hub, by name, as diffusers' checkpoints.
        spec: The `ModelSpec`'s class, which takes a configuration, or with `open` a checkpoint.
        model: "module:class" of its `wan_tpu.families.model.Model`, which needs JAX and torch.
        small: "module:function" that writes small checkpoints (`wan_tpu.tiny`), which needs diffusers.
        with_experts: "module:class" of a checkpoint whose experts are replaced by files of another format. It takes
            (source, files, the attention density of sparse experts). None if the family has none.
        licence: The weights' licence in a sentence, if they aren't free of charge for everybody.
        display_name: The name that this licence asks user interfaces to show, if it asks for one.
    """

    name: str
    title: str
    transformer: str
    published: Mapping[str, Any]
    hub_ids: Mapping[str, str]
    spec: type[Any]
    model: str
    small: str
    with_experts: str | None = None
    licence: str = ""
    display_name: str = ""

    @property
    def example(self) -> str:
        """A hub id of one of its models."""
        return next(iter(self.hub_ids.values()))

    def part(self, path: str) -> Any:
        """Import and return the object at "module:name"."""
        module, _, name = path.partition(":")
        return getattr(importlib.import_module(module), name)
