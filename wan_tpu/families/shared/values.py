"""Values for the tensors of small checkpoints, chosen so that ignoring any of them makes a difference."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def set_own_values(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Give every parameter and persistent buffer of a new module its own values, as training would, and return it.

    Norms start as ones, biases as zeros and tables as sines: a program that ignored such a tensor of a checkpoint, or
    computed the table itself, would give the same result. Convolutions start with weights that pass on a third of their
    input's variance: after a VAE's many, only biases would matter, and a wrong image would change nothing.
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
    """Remove `later` keys, which a class got later, if they have their defaults, as published files do."""
    config = json.loads(file.read_text())
    remaining = {key: value for key, value in config.items() if key not in later or value != later[key]}
    file.write_text(json.dumps(remaining, indent=2) + "\n")
