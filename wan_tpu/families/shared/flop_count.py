"""Count the floating-point operations of torch code, exactly and without running it."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.flop_counter import FlopCounterMode

from wan_tpu.request import ResolvedRequest


class Flops(Protocol):
    """Floating-point operations (a multiply-add is two) of each stage of one model, on all devices together."""

    def encoder(self, request: ResolvedRequest, *, prompts: int) -> int:
        """Return the operations of encoding a number of prompts, and the request's image if it has one."""

    def step(self, latent_shape: tuple[int, ...], *, branches: int, images: int = 0) -> int:
        """Return the operations of a denoising step over latents [1, C, T, H, W], with `branches` guidance branches.

        `images` of the request add tokens only where they are part of the transformer's sequence.
        """

    def decoder(self, latent_shape: tuple[int, ...]) -> int:
        """Return the operations of decoding latents [1, C, T, H, W]."""


def count(build: Callable[[], torch.nn.Module], run: Callable[[Any], object]) -> int:
    """Count the operations of `run(build())` on torch's meta device (a multiply-add is two).

    Matrix products, convolutions and attention are counted, elementwise work is not.
    """
    with torch.device("meta"), torch.no_grad():
        module = build().eval()
        with FlopCounterMode(display=False) as counter:
            run(module)
    return counter.get_total_flops()


def count_t5(build: Callable[[], torch.nn.Module], tokens: int) -> int:
    """Count T5's encoding of one text of so many tokens."""
    return count(build, lambda module: module.encoder(inputs_embeds=module.shared(make_ids(tokens))))


def make_ids(tokens: int) -> torch.Tensor:
    """Return ids [1, tokens] on the meta device."""
    return torch.ones(1, tokens, dtype=torch.int32, device="meta")
