"""What a fast way has computed, whether that is right, and how to compute it again.

The repeat isn't run at once, because XLA believes that it always runs, and would hide transfers behind it: it comes
after all transfers.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax

from wan_tpu_kernels.flash_attention import repeat_if

T = TypeVar("T")
R = TypeVar("R")


class Attempt(NamedTuple, Generic[T]):
    """The outcome of a fast way.

    Attributes:
        result: What it has computed.
        right: A boolean scalar: whether that is right.
        again: Computes it in a way that is always right.
    """

    result: T
    right: jax.Array
    again: Callable[[], T]

    def then(self, function: Callable[[T], R]) -> "Attempt[R]":
        """Return the attempt of what is computed from the result."""
        return Attempt(function(self.result), self.right, lambda: function(self.again()))

    def settle(self) -> T:
        """Return what is right, computed again if need be."""
        return repeat_if(~self.right, self.result, self.again)
