"""How the columns of a kernel's result are laid out: as they are, or in groups for devices, and those in parts.

Shapes: L rows (tokens), C channels, G column groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

Cut = jax.Array | tuple[jax.Array, ...]


@dataclass(frozen=True)
class Columns:
    """The columns of a result [L, C].

    groups  more than 1: [G, L, C/G] in its place
    parts   their widths, which add up to C/G: an array for each of them, with those columns of every group; (): one
            array with all
    """

    channels: int
    groups: int = 1
    parts: tuple[int, ...] = ()

    @property
    def a_group(self) -> int:
        """Columns of a group."""
        return self.channels // self.groups

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of a group in each array."""
        assert sum(self.parts) in (0, self.a_group), self
        return self.parts or (self.a_group,)

    def shapes(self, rows: int, dtype: Any) -> list[jax.ShapeDtypeStruct]:
        """Return the arrays, for `rows` rows."""
        lead = () if self.groups == 1 else (self.groups,)
        return [jax.ShapeDtypeStruct((*lead, rows, width), dtype) for width in self.widths]

    def specs(self, block: int) -> list[pl.BlockSpec]:
        """Return their blocks, of `block` rows by the first axis of the grid."""
        if self.groups == 1:
            return [pl.BlockSpec((block, width), lambda i: (i, 0)) for width in self.widths]
        return [pl.BlockSpec((self.groups, block, width), lambda i: (0, i, 0)) for width in self.widths]

    def store(self, refs: Sequence[Any], rows: Any, lane: int, values: jax.Array) -> None:
        """Write values [rows, n] to where the result's columns from `lane` on lie; n may not cross a part's end."""
        group, within = divmod(lane, self.a_group)
        for ref, width in zip(refs, self.widths, strict=True):
            if within < width:
                lanes = slice(within, within + values.shape[1])
                if self.groups == 1:
                    ref[rows, lanes] = values
                else:
                    ref[group, rows, lanes] = values
                return
            within -= width

    def cut(self, x: jax.Array) -> Cut:
        """Return a result [L, C] laid out so, in plain jnp."""
        if self.groups > 1:
            x = x.reshape(x.shape[0], self.groups, -1).transpose(1, 0, 2)
        if not self.parts:
            return x
        ends = [sum(self.parts[: n + 1]) for n in range(len(self.parts) - 1)]
        return tuple(jnp.split(x, ends, axis=-1))

    def given(self, arrays: Sequence[jax.Array]) -> Cut:
        """Return a kernel's results as a caller wants them."""
        return tuple(arrays) if self.parts else arrays[0]
