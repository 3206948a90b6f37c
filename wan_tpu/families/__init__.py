"""Model families, a folder each, found by the transformer class that a checkpoint names. This file needs no JAX."""

import importlib
import pkgutil
from pathlib import Path

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.family import Family
from wan_tpu.spec import ModelSpec

_FOLDERS = [
    importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__) if found.ispkg
]
# By transformer class.
FAMILIES: dict[str, Family] = {
    folder.FAMILY.transformer: folder.FAMILY for folder in _FOLDERS if hasattr(folder, "FAMILY")
}


def family_of(checkpoint: Checkpoint) -> Family:
    """Return the family of an opened checkpoint; raises `CheckpointError` when none knows it."""
    found = checkpoint.class_name("transformer") if checkpoint.has("transformer") else "no transformer"
    if found not in FAMILIES:
        known = [f"{family.title} ({name}), for example {family.example}" for name, family in FAMILIES.items()]
        raise CheckpointError(
            f"{checkpoint.source} is a {checkpoint.index.get('_class_name')} with {found}; "
            f"supported are {'; '.join(known)}"
        )
    return FAMILIES[found]


def open_spec(source: str | Path) -> ModelSpec:
    """Return the spec of a diffusers directory or hub id; raises `CheckpointError` when no family knows it.

    Only configurations are read.
    """
    return spec_of(Checkpoint(source))


def spec_of(checkpoint: Checkpoint) -> ModelSpec:
    """Return the spec of an opened checkpoint; raises `CheckpointError`."""
    family = family_of(checkpoint)
    try:
        return family.open(checkpoint)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint.source} has a damaged configuration ({type(error).__name__}: {error}); fetch it again"
        ) from error


def published() -> dict[str, Family]:
    """Return every published model whose configuration is here, by name, with its family."""
    return {name: family for family in FAMILIES.values() for name in family.presets}


def preset_spec(name: str) -> ModelSpec:
    """Return the spec of a published model."""
    family = published()[name]
    return family.spec(family.presets[name])
