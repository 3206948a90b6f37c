"""The device mesh and how arrays lie on it: axes 'dp' (guidance batch), 'sp' (tokens), 'tp' (heads, weights)."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wan_tpu.errors import MeshError

AXES = ("dp", "sp", "tp")


class MeshShape(NamedTuple):
    """How many devices lie along each axis."""

    dp: int
    sp: int
    tp: int


MeshLike = Mesh | Sequence[int | None] | Mapping[str, int] | None


def make_mesh(shape: MeshLike, *, heads: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh ('dp', 'sp', 'tp') over `devices` (all, when left out).

    shape  (dp, sp, tp), {"dp": ..., ...}, or a finished mesh with these axes; what is None or left out takes the
           default of `fill_shape`

    Raises `MeshError` when the shape asks for more devices than there are, or `heads` doesn't divide by tp.
    """
    # Mesh(...) keeps the axes automatic: XLA propagates shardings from the annotations of weights and tokens.
    if isinstance(shape, Mesh):
        if set(shape.axis_names) != set(AXES):
            raise MeshError(f"the mesh has axes {shape.axis_names}; it needs {AXES}, of size 1 where unused")
        _check_heads(shape.shape["tp"], heads)
        return Mesh(shape.devices, shape.axis_names)
    if isinstance(shape, Mapping):
        if not set(shape) <= set(AXES):
            raise MeshError(f"the mesh names axes {sorted(shape)}; allowed are {', '.join(AXES)}")
        shape = [shape.get(axis) for axis in AXES]
    devices = _all_devices() if devices is None else list(devices)
    filled = fill_shape((None, None, None) if shape is None else shape, len(devices), heads)
    _check_heads(filled.tp, heads)
    return Mesh(np.array(devices[: math.prod(filled)]).reshape(filled), AXES)


def _all_devices() -> list[jax.Device]:
    try:
        return jax.devices()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise MeshError(
            f"JAX finds no device ({reason}); set JAX_PLATFORMS=cpu, or install .[tpu] or .[cuda]"
        ) from None


def fill_shape(shape: Sequence[int | None], devices: int, heads: int) -> MeshShape:
    """Return (dp, sp, tp) with a default for every axis that is None, at most `devices` in all.

    dp 2 when the free devices are even in number (guidance runs two branches), tp as many of the rest as divide
    `heads`, sp what remains.
    """
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    if len(sizes) != 3 or any(n is not None and (type(n) is not int or n < 1) for n in sizes):
        raise MeshError(f"mesh {shape!r} is not (dp, sp, tp) with three positive integers")
    dp, sp, tp = sizes
    if dp is None:
        free = devices // ((sp or 1) * (tp or 1))
        dp = 2 if free > 0 and free % 2 == 0 else 1
    if tp is None:
        tp = math.gcd(max(1, devices // (dp * (sp or 1))), heads)
    if sp is None:
        sp = max(1, devices // (dp * tp))
    if dp * sp * tp > devices:
        raise MeshError(f"mesh ({dp}, {sp}, {tp}) needs {dp * sp * tp} devices, there are {devices}; lower one axis")
    return MeshShape(dp, sp, tp)


def _check_heads(tp: int, heads: int) -> None:
    if heads % tp:
        allowed = [n for n in range(1, heads + 1) if heads % n == 0]
        nearest = max(n for n in allowed if n <= tp)
        raise MeshError(
            f"tp is {tp}, which doesn't divide the {heads} attention heads; "
            f"allowed are {allowed}, nearest {nearest} (give the other devices to --sp)"
        )


def check_tokens(mesh: Mesh, tokens: int) -> None:
    """Raise `MeshError` when `tokens` can't be split evenly over 'sp'."""
    sp = mesh.shape["sp"]
    if tokens % sp:
        nearest = max(n for n in range(1, sp + 1) if tokens % n == 0)
        raise MeshError(
            f"sp is {sp}, which doesn't divide the {tokens} tokens of this size and length; "
            f"nearest that does: --sp {nearest}"
        )


class Rule(NamedTuple):
    """Where the weights whose name matches `pattern` (fully) lie: one mesh axis or None for each dimension."""

    pattern: str
    spec: tuple[str | None, ...]


def weight_sharding(
    mesh: Mesh, rules: Sequence[Rule], name: str, shape: Sequence[int], *, stacked: bool
) -> NamedSharding:
    """Return the sharding of one weight.

    name, shape  as in the checkpoint; `stacked` adds an unsharded leading axis over the scanned blocks

    A dimension that its axis doesn't divide is replicated. Raises `MeshError` unless exactly one rule matches.
    """
    matching = [rule for rule in rules if re.fullmatch(rule.pattern, name)]
    if len(matching) != 1:
        raise MeshError(f"weight {name} matches {len(matching)} sharding rules, it must be exactly one")
    axes = [
        axis if axis is not None and shape[i] % mesh.shape[axis] == 0 else None
        for i, axis in enumerate(matching[0].spec)
    ]
    return NamedSharding(mesh, P(*([None] if stacked else []), *axes))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that puts a whole copy on every device."""
    return NamedSharding(mesh, P())


def activation_axes(mesh: Mesh, batch: int, tokens: int) -> tuple[str | None, str | tuple[str, str] | None]:
    """Return the mesh axes of (batch, tokens): 'dp' takes tokens too when there is one branch only."""
    if batch % mesh.shape["dp"] == 0:
        return "dp", "sp"
    both = mesh.shape["dp"] * mesh.shape["sp"]
    return None, ("dp", "sp") if tokens % both == 0 else "sp"
