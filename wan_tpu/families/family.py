"""What a model family registers, as `FAMILY` of its folder. No JAX, no torch: every process reads it."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.spec import ModelSpec


@dataclass(frozen=True)
class Family:
    """A folder of `wan_tpu/families/`.

    name         of the folder; title  for people
    example      a hub id of one of its models
    transformer  the class that its checkpoints' transformer has: by it they are found
    presets      the published models' configurations, by name
    spec         a configuration -> its `ModelSpec`
    open         a checkpoint -> its `ModelSpec`; raises `CheckpointError` for what the family doesn't run
    model        "module:class" of its `wan_tpu.families.model.Model`, which needs JAX and torch
    small        "module:function" that writes small checkpoints (`wan_tpu.tiny`), which needs diffusers
    with_experts "module:class" of a checkpoint with other experts, from files of another form: (source, files, share of
                 the blocks of keys that sparse ones keep); None: the family has none
    """

    name: str
    title: str
    example: str
    transformer: str
    presets: Mapping[str, Any]
    spec: Callable[[Any], ModelSpec]
    open: Callable[[Checkpoint], ModelSpec]
    model: str
    small: str
    with_experts: str | None = None

    def part(self, where: str) -> Any:
        """Return what "module:name" names, imported now."""
        module, _, name = where.partition(":")
        return getattr(importlib.import_module(module), name)
