"""Model families, one folder each, recognised by the transformer class of a checkpoint. This file needs no JAX."""

import dataclasses
import importlib
import pkgutil
from pathlib import Path

from wan_tpu import model_limits
from wan_tpu.checkpoint import SETTINGS, Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.family import Family
from wan_tpu.request import NO_OVERRIDES
from wan_tpu.spec import ModelSpec
from wan_tpu.suggest import did_you_mean

_FOLDERS = [
    importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__) if module.ispkg
]
# The families by transformer class.
FAMILIES: dict[str, Family] = {
    folder.FAMILY.transformer: folder.FAMILY for folder in _FOLDERS if hasattr(folder, "FAMILY")
}


def family_of(checkpoint: Checkpoint) -> Family:
    """Return the family of an opened checkpoint; raises `CheckpointError` when none knows it."""
    transformer = checkpoint.class_name("transformer") if checkpoint.has("transformer") else "no transformer"
    if transformer not in FAMILIES:
        known = [f"{family.title} ({name}), for example {family.example}" for name, family in FAMILIES.items()]
        raise CheckpointError(
            f"{checkpoint.source} is a {checkpoint.index.get('_class_name')} with {transformer}; "
            f"supported: {'; '.join(known)}"
        )
    return FAMILIES[transformer]


def list_hub_ids() -> dict[str, str]:
    """Return where each published model is on the Hugging Face hub, by the model's name."""
    return {name: hub_id for family in FAMILIES.values() for name, hub_id in family.hub_ids.items()}


def name_of(model: str) -> str:
    """Return a published model's name, given its name or hub id; anything else is returned as it is."""
    return next((name for name, hub_id in list_hub_ids().items() if hub_id.lower() == model.lower()), model)


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a diffusers directory, a hub id, or the name of a published model unless a folder has that name.

    Raises:
        CheckpointError: There is no such checkpoint.
        Unavailable: The bucket, the hub or the disk doesn't answer.
    """
    hub_ids, name = list_hub_ids(), str(source)
    if isinstance(source, str) and name and "/" not in name and not Path(name).exists():
        if name in list_published() and name not in hub_ids:
            raise CheckpointError(
                f"{name} isn't on the hub in diffusers' layout; give the directory of its checkpoint (docs/models.md)"
            )
        if name not in hub_ids:
            raise CheckpointError(
                f"{name} is neither a directory, nor a hub id (OWNER/NAME), nor the name of a model on the hub"
                f"{did_you_mean(name, hub_ids)}; wan-tpu models lists them"
            )
        source = hub_ids[name]
    return Checkpoint(source)


def open_spec(source: str | Path) -> ModelSpec:
    """Return the spec of a checkpoint, as `open_checkpoint` takes it, reading only its configurations.

    Raises:
        CheckpointError: No family knows it.
    """
    return spec_of(open_checkpoint(source))


def spec_of(checkpoint: Checkpoint) -> ModelSpec:
    """Return the spec of an opened checkpoint; raises `CheckpointError`."""
    family = family_of(checkpoint)
    try:
        spec = family.spec.open(checkpoint)
        _check_defaults(spec, checkpoint)
        return spec
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint.source} has a damaged configuration ({type(error).__name__}: {error}); fetch it again"
        ) from error


def _check_defaults(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint's defaults for settings that its model doesn't have, just as such requests are refused."""
    defaults = dict(spec.overrides.defaults)
    if not set(defaults) & set(spec.unused):
        return
    usual: ModelSpec = dataclasses.replace(spec, overrides=NO_OVERRIDES)  # type: ignore[type-var]
    for name in spec.unused:
        is_derived = name == "guidance_scale_2" and defaults.get(name) == defaults.get("guidance_scale")
        if name in defaults and not is_derived and defaults[name] != getattr(usual.defaults, name):
            raise CheckpointError(
                f"{checkpoint.folder / SETTINGS}: in defaults, {name} is {defaults[name]:g}, which {spec.name} "
                "doesn't use; remove it"
            )


def family_of_spec(model: ModelSpec) -> Family | None:
    """Return the family of a spec; None if it belongs to none."""
    return next((family for family in FAMILIES.values() if isinstance(model, family.spec)), None)


def list_published() -> dict[str, Family]:
    """Return the family of each published model whose configuration is in this package, by the model's name."""
    return {name: family for family in FAMILIES.values() for name in family.published}


def published_spec(name: str, decoder: str | None = None) -> ModelSpec:
    """Return the spec of a published model.

    Args:
        decoder: The name of another decoder than the usual one.

    Raises:
        InvalidRequest: The model doesn't have it.
    """
    family = list_published()[name]
    spec = family.spec(family.published[name])
    return spec if decoder is None else spec.with_decoder(decoder)


model_limits.list_models = lambda: map(published_spec, list_published())
