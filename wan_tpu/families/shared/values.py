"""Values for the tensors of small checkpoints, such that none of them can be ignored without a difference."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def set_own_values(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Give every parameter and persistent buffer of a new module values of its own, as training would; return it.

    Norms start as ones, biases as zeros and tables as sines: a program that ignored such a tensor of a checkpoint, or
    worked the table out by itself, would compute the same. Convolutions start with weights that pass on a third of
    their input's variance: after the many of a VAE, biases alone would decide, and a wrong image would change nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        if isinstance(part, torch.nn.Conv2d | torch.nn.Conv3d):
            torch.nn.init.kaiming_normal_(part.weight, nonlinearity="linear", generator=generator)
    parameters = {name for name, _ in module.named_parameters()}
    for name, tensor in module.state_dict().items():
        if name not in parameters or bool((tensor == tensor.flatten()[0]).all()):
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return module


def leave_out_later_keys(file: Path, later: Mapping[str, Any]) -> None:
    """Leave keys that a class got later out of a configuration where they have their defaults, as published files do.

    later: those keys, and their defaults.
    """
    config = json.loads(file.read_text())
    kept = {key: value for key, value in config.items() if key not in later or value != later[key]}
    file.write_text(json.dumps(kept, indent=2) + "\n")
