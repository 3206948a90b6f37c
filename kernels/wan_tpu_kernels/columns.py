"""How the columns of a kernel's result are laid out: as they are, or in groups for devices, optionally in parts.

Shapes: L rows (tokens), C channels, G column groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

ColumnParts = jax.Array | tuple[jax.Array, ...]


@dataclass(frozen=True)
class Columns:
    """The columns of a result [L, C].

    Attributes:
        channels: C.
        groups: With more than one, the result is [G, L, C/G] instead.
        parts: Widths that add up to C/G: the result is one array per width, with those columns of every group. If
            empty, it is one array with all columns.
    """

    channels: int
    groups: int = 1
    parts: tuple[int, ...] = ()

    @property
    def group_width(self) -> int:
        """Columns of a group."""
        return self.channels // self.groups

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of a group in each array."""
        assert sum(self.parts) in (0, self.group_width), self
        return self.parts or (self.group_width,)

    def shapes(self, rows: int, dtype: Any) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the arrays that hold `rows` rows."""
        lead = () if self.groups == 1 else (self.groups,)
        return [jax.ShapeDtypeStruct((*lead, rows, width), dtype) for width in self.widths]

    def specs(self, block: int) -> list[pl.BlockSpec]:
        """Return the arrays' block specifications: `block` rows along the first axis of the grid."""
        if self.groups == 1:
            return [pl.BlockSpec((block, width), lambda i: (i, 0)) for width in self.widths]
        return [pl.BlockSpec((self.groups, block, width), lambda i: (0, i, 0)) for width in self.widths]

    def store(self, refs: Sequence[Any], rows: Any, lane: int, values: jax.Array) -> None:
        """Write values [rows, n] to the result's columns from `lane` on; they may not cross the end of a part."""
        group, within = divmod(lane, self.group_width)
        for ref, width in zip(refs, self.widths, strict=True):
            if within < width:
                lanes = slice(within, within + values.shape[1])
                if self.groups == 1:
                    ref[rows, lanes] = values
                else:
                    ref[group, rows, lanes] = values
                return
            within -= width

    def cut(self, x: jax.Array) -> ColumnParts:
        """Lay out a result [L, C], in plain jnp."""
        if self.groups > 1:
            x = x.reshape(x.shape[0], self.groups, -1).transpose(1, 0, 2)
        if not self.parts:
            return x
        ends = [sum(self.parts[: n + 1]) for n in range(len(self.parts) - 1)]
        return tuple(jnp.split(x, ends, axis=-1))

    def unwrap(self, arrays: Sequence[jax.Array]) -> ColumnParts:
        """Return a kernel's list of results as callers expect it: a tuple if there are parts, else the only array."""
        return tuple(arrays) if self.parts else arrays[0]
