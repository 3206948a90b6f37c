"""Count the floating-point operations of torch code, exactly and without running it."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def count(build: Callable[[], torch.nn.Module], run: Callable[[Any], object]) -> int:
    """Count the operations of `run(build())` on torch's meta device (a multiply-add is two).

    Matrix products, convolutions and attention are counted, elementwise work is not.
    """
    with torch.device("meta"), torch.no_grad():
        module = build().eval()
        with FlopCounterMode(display=False) as counter:
            run(module)
    return counter.get_total_flops()
