"""Reads a component's configuration, filled in with the defaults of its class in diffusers or transformers.

Published files have only the keys that their class had when they were written.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError

# Defaults of the schedulers' settings that change what they compute, except the shifts, which families read.
UNIPC: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "solver_order": 2,
    "solver_type": "bh2",
    "prediction_type": "epsilon",
    "predict_x0": True,
    "lower_order_final": True,
    "disable_corrector": [],
    "solver_p": None,
    "final_sigmas_type": "zero",
    "thresholding": False,
    "use_flow_sigmas": False,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "use_dynamic_shifting": False,
    "sigma_min": None,
    "sigma_max": None,
    "shift_terminal": None,
}
FLOW_MATCH_EULER: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "use_dynamic_shifting": False,
    "shift_terminal": None,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "invert_sigmas": False,
    "stochastic_sampling": False,
}
# Defaults of the encoders' settings that this project reads itself, by transformers' class; the class fills in others.
ENCODERS: dict[str, dict[str, Any]] = {
    "UMT5EncoderModel": {"vocab_size": 250112},
    "T5EncoderModel": {"vocab_size": 32128},
    "Qwen2_5_VLTextModel": {"vocab_size": 152064},
    "CLIPVisionModel": {"image_size": 224, "patch_size": 32},
    "CLIPVisionModelWithProjection": {"image_size": 224, "patch_size": 32},
    "SiglipVisionModel": {"image_size": 224, "patch_size": 16, "hidden_size": 768},
}


def complete_config(checkpoint: Checkpoint, component: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a component's configuration with every key of `defaults`.

    Keys about the file's origin (`_class_name`, ...) are left out.

    Raises:
        CheckpointError: A value has the wrong type.
    """
    config = {key: value for key, value in checkpoint.config(component).items() if not key.startswith("_")}
    for key, value in config.items():
        if not _fits(value, defaults.get(key)):
            raise CheckpointError(
                f"{checkpoint.source} has {key} {value!r} in {component}/config.json; give something like "
                f"{defaults[key]!r}, the default"
            )
    return {**defaults, **config}


def check_components(checkpoint: Checkpoint, needed: Iterable[str], classes: Mapping[str, str]) -> None:
    """Check that a checkpoint has all components that it needs, and some of a certain class.

    Raises:
        CheckpointError: A component is missing, or is of another class.
    """
    for component in (*needed, *classes):
        if not checkpoint.has(component):
            raise CheckpointError(f"{checkpoint.source} has no {component}; give a complete checkpoint")
    for component, expected in classes.items():
        if (name := checkpoint.class_name(component)) != expected:
            raise CheckpointError(f"{checkpoint.source} has {component} {name}; supported: {expected}")


def check_supported(
    checkpoint: Checkpoint,
    component: str,
    config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    supported: Mapping[str, Any],
) -> None:
    """Check that every setting, or its default, is one that this project runs.

    Args:
        defaults: Settings that matter, and their defaults.
        supported: Settings that must have another value than their default, with that value; all others must equal
            their default.

    Raises:
        CheckpointError: A setting has another value.
    """
    for key, default in defaults.items():
        value, expected = config.get(key, default), supported.get(key, default)
        if (value or None) != (expected or None):
            raise CheckpointError(f"{checkpoint.source} has {component} {key} {value!r}; supported: {expected!r}")


def _fits(value: Any, default: Any) -> bool:
    """Return whether a value has the type of a default; any type fits a default of None."""
    if default is None:
        return True
    if isinstance(default, list):
        return isinstance(value, list) and all(_fits(item, default[0]) for item in value if default)
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, int):
        return isinstance(value, int)
    return isinstance(value, int | float if isinstance(default, float) else type(default))
