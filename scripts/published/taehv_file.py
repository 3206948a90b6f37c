"""Files as TAEHV publishes them, with random weights."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch

GROWTHS = (1, 2, 2)


def make_file(
    path: Path, *, channels: int = 16, patch: int = 1, is_super: bool = False, growths: Sequence[int] = GROWTHS
) -> dict[str, torch.Tensor]:
    """Write a file with random weights under the names of the published ones, in float16; return them in float32."""
    rng, tensors = np.random.default_rng(0), dict[str, np.ndarray]()

    def add(name: str | int, outputs: int, inputs: int, side: int = 3, groups: int = 1, bias: bool = True) -> None:
        scale = 1.2 / np.sqrt(inputs // groups * side * side)
        tensors[f"decoder.{name}.weight"] = rng.standard_normal((outputs, inputs // groups, side, side)) * scale
        if bias:
            tensors[f"decoder.{name}.bias"] = rng.standard_normal(outputs) * 0.1

    widths = (512, 256, 128, 64) if is_super else (256, 128, 64, 64)
    if is_super:
        add(0, widths[0], channels, side=1, bias=False)
    else:
        add(1, widths[0], channels)
    position = 1 if is_super else 3
    for here, there, growth in zip(widths, widths[1:], growths, strict=False):
        for _ in range(3):
            if is_super:
                add(f"{position}.conv.0", 2 * here, 2 * here, side=7, groups=2 * here, bias=False)
                add(f"{position}.conv.1", 4 * here, 2 * here, side=1)
                add(f"{position}.conv.3", here, 4 * here, side=1, bias=False)
            else:
                add(f"{position}.conv.0", here, 2 * here)
                add(f"{position}.conv.2", here, here)
                add(f"{position}.conv.4", here, here)
            position += 1
        if is_super:
            add(position, 4 * there, here)
            add(f"{position + 3}.conv", there * growth, there, side=1, bias=False)
            position += 4
        else:
            add(f"{position + 1}.conv", here * growth, here, side=1, bias=False)
            add(position + 2, there, here, bias=False)
            position += 3
    add(22, 3 * patch**2, widths[-1])
    tensors["encoder.0.weight"] = np.zeros((64, 3, 3, 3))
    safetensors.numpy.save_file({name: tensor.astype(np.float16) for name, tensor in tensors.items()}, path)
    return {name: torch.from_numpy(tensor.astype(np.float16).astype(np.float32)) for name, tensor in tensors.items()}
