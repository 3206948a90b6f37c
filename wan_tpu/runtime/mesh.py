"""The device mesh and how arrays are sharded over it.

Axes: 'dp' splits guidance branches; 'sp' and 'tp' split tokens and weights, and during self-attention 'tp' splits heads
instead of tokens.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wan_tpu.chip_files import chip_files
from wan_tpu.errors import MeshError

AXES = ("dp", "sp", "tp")
SHARDS = ("sp", "tp")  # The axes that split the tokens of one branch, and each large weight.


class MeshShape(NamedTuple):
    dp: int
    sp: int
    tp: int


MeshLike = Mesh | Sequence[int | None] | Mapping[str, int] | None


def make_mesh(shape: MeshLike, *, heads: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh with the axes 'dp', 'sp' and 'tp'.

    The factor of 'tp' that doesn't divide `heads` goes to 'sp': 16 with 40 heads become 2 x 8.

    Args:
        shape: (dp, sp, tp), {"dp": ..., ...}, or a finished mesh with these axes. An axis that is None or missing takes
            the default of `fill_shape`.

    Raises:
        MeshError: The shape needs more devices than there are, or leaves a process without one.
    """
    # Mesh(...) keeps the axes automatic: XLA propagates shardings from the annotations of weights and tokens.
    if isinstance(shape, Mesh):
        if shape.axis_names != AXES:
            raise MeshError(f"the mesh has axes {shape.axis_names}; it needs {AXES}, of size 1 where unused")
        return _mesh(shape.devices.flat, MeshShape(*(shape.shape[axis] for axis in AXES)), heads)
    if isinstance(shape, Mapping):
        if not set(shape) <= set(AXES):
            raise MeshError(f"the mesh names axes {sorted(shape)}; allowed: {', '.join(AXES)}")
        shape = [shape.get(axis) for axis in AXES]
    available = _all_devices() if devices is None else list(devices)
    sizes = fill_shape((None, None, None) if shape is None else shape, len(available), heads)
    mesh = _mesh(available[: math.prod(sizes)], sizes, heads)
    if devices is None:
        _check_processes(mesh, len(available))
    return mesh


def _mesh(devices: Iterable[jax.Device], shape: MeshShape, heads: int) -> Mesh:
    tp = math.gcd(shape.tp, heads)
    return Mesh(np.array(list(devices)).reshape(shape.dp, shape.sp * shape.tp // tp, tp), AXES)


def _check_processes(mesh: Mesh, devices: int) -> None:
    """Refuse a mesh that leaves a process without a device, because that process couldn't take part in the programs."""
    idle = set(range(jax.process_count())) - {device.process_index for device in mesh.devices.flat}
    if idle:
        raise MeshError(
            f"mesh {tuple(mesh.shape.values())} leaves {len(idle)} of {jax.process_count()} hosts without a device; "
            f"use all {devices} devices of the slice, or a slice of one host"
        )


def _all_devices() -> list[jax.Device]:
    advice = (
        "wan-tpu doctor --part host --part jax says why; set JAX_PLATFORMS=cpu to compute on the CPU, which "
        "takes days for a full-size video"
    )
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise MeshError(f"JAX finds no device ({str(error).splitlines()[0]}); {advice}") from None
    # Without libtpu, JAX falls back to the CPU, at most with a warning.
    if devices[0].platform == "cpu" and chip_files() and "cpu" not in os.environ.get("JAX_PLATFORMS", ""):
        raise MeshError(f"this machine has a TPU ({chip_files()[0]}), but JAX finds only its CPU; {advice}")
    return devices


def fill_shape(shape: Sequence[int | None], devices: int, heads: int) -> MeshShape:
    """Return (dp, sp, tp) with a default for every axis that is None.

    By default dp is 2 when the number of free devices is even (guidance runs two branches), tp is as many of the rest
    as divide `heads`, and sp is what remains.

    Raises:
        MeshError: `shape` isn't a valid shape, or it needs more devices than there are.
    """
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    if len(sizes) != 3 or any(n is not None and (type(n) is not int or n < 1) for n in sizes):
        raise MeshError(f"mesh {shape!r} is not (dp, sp, tp), three positive integers")
    dp, sp, tp = sizes
    if dp is None:
        free = devices // ((sp or 1) * (tp or 1))
        dp = 2 if free > 0 and free % 2 == 0 else 1
    if tp is None:
        tp = math.gcd(max(1, devices // (dp * (sp or 1))), heads)
    if sp is None:
        sp = max(1, devices // (dp * tp))
    if dp * sp * tp > devices:
        raise MeshError(
            f"mesh ({dp}, {sp}, {tp}) needs {dp * sp * tp} devices, but there are {devices}; lower one axis"
        )
    return MeshShape(dp, sp, tp)


class Rule(NamedTuple):
    """The sharding of weights whose whole name matches `pattern`: mesh axes, or None, for each dimension."""

    pattern: str
    spec: tuple[str | tuple[str, ...] | None, ...]


def rule_of(rules: Sequence[Rule], name: str) -> Rule:
    """Return the rule for a weight, by its name in the checkpoint; raises `MeshError` unless exactly one matches."""
    matching = [rule for rule in rules if re.fullmatch(rule.pattern, name)]
    if len(matching) != 1:
        raise MeshError(f"weight {name} matches {len(matching)} sharding rules instead of exactly one")
    return matching[0]


def weight_spec(mesh: Mesh, rules: Sequence[Rule], name: str, shape: Sequence[int], *, stacked: bool) -> P:
    """Return how one weight is split. A dimension that its axes don't divide is replicated.

    Args:
        rules: The sharding rules of the weight's component.
        stacked: Whether it has an unsharded leading axis over the scanned blocks.

    Raises:
        MeshError: No rule matches its name, or several do.
    """
    axes = [
        axis if axis is not None and shape[i] % axis_size(mesh, axis) == 0 else None
        for i, axis in enumerate(rule_of(rules, name).spec)
    ]
    return P(*([None] if stacked else []), *axes)


def split_layers(mesh: Mesh, rules: Sequence[Rule], layers: str, stacked: Mapping[str, Any]) -> dict[str, P]:
    """Return how the weights of a transformer's layers, [depth, ...], are split; `layers` is the layers' name in it."""
    return {
        name: weight_spec(mesh, rules, f"{layers}.*.{name}", value.shape[1:], stacked=True)
        for name, value in stacked.items()
    }


def run_on_devices(function: Callable[..., Any], mesh: Mesh, inputs: Any, out_specs: Any, **split: Any) -> Any:
    """Run a function on each device's part of the inputs, a named tuple; fields that aren't in `split` are whole."""
    specs = jax.tree.map(lambda _: P(), inputs)._replace(**split)
    return jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False)(inputs)


def axis_size(mesh: Mesh, axes: str | tuple[str, ...]) -> int:
    """Return the number of devices along an axis, or along several axes together."""
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding that puts a whole copy on every device."""
    return NamedSharding(mesh, P())


def describe_sharding(sharding: Any) -> str:
    """Describe a sharding in canonical form: P("tp") and P("tp", None) are equal, and axes of size 1 are ignored."""
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    sizes = sharding.mesh.shape
    axes_by_dimension = [axes if isinstance(axes, tuple) else (axes,) for axes in sharding.spec]
    used_axes = [tuple(axis for axis in axes if axis is not None and sizes[axis] > 1) for axes in axes_by_dimension]
    while used_axes and not used_axes[-1]:
        used_axes.pop()
    return str(used_axes)


class TokenLayout(NamedTuple):
    """The layout of the tokens of all guidance branches, [B, L, C], on a mesh."""

    branch_axis: str | None  # 'dp', or None when every device has a part of every branch.
    token_axes: tuple[str, ...]  # The axes that split L, slowest first, those of heads last.
    padded: int  # L rounded up so that every device has the same number of tokens, in whole hardware tiles.
    head_axes: tuple[str, ...] = ("tp",)  # The axes that split heads instead of tokens during self-attention.

    @property
    def spec(self) -> P:
        """How arrays [B, L, ...] are split."""
        return P(self.branch_axis, self.token_axes)


def token_layout(mesh: Mesh, branches: int, tokens: int, heads: int = 0, block: int = 1) -> TokenLayout:
    """Return the layout of tokens on a mesh: 'dp' splits branches, or tokens if there are too few branches.

    Args:
        branches: B, the branches of guidance.
        heads: Heads of self-attention. If 'dp' splits tokens and its size divides the heads, it splits heads as well,
            because gathering keys and values over 'dp' takes three times as long as the exchange (docs/benchmarks.md).
        block: Number of consecutive tokens that always stay on one device, whatever the mesh.
    """
    split = branches % mesh.shape["dp"] == 0
    axes = SHARDS if split else AXES
    head_axes: tuple[str, ...] = ("tp",)
    if not split and heads and heads % (mesh.shape["dp"] * mesh.shape["tp"]) == 0:
        axes, head_axes = ("sp", "dp", "tp"), ("dp", "tp")
    # A bfloat16 tile has 16 rows. With 8 tiles, 128 rows, the blocks of all kernels come out whole more often.
    unit = axis_size(mesh, axes) * math.lcm(block, 128 if mesh.devices.flat[0].platform == "tpu" else 1)
    return TokenLayout("dp" if split else None, axes, -(-tokens // unit) * unit, head_axes)
