"""Compile a published program for a slice, and price it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from actors.planning.calibration import Calibration
from actors.planning.slice_description import describe_slice
from cluster.slice_spec import SliceSpec
from wan_tpu.pricing.analyse import analyse
from wan_tpu.pricing.cost import Cost, Times
from wan_tpu.pricing.ici import interconnect_of
from wan_tpu.pricing.kernel_prices import KernelPrices, count_alone
from wan_tpu_kernels.catalogue import ATTENTION

# These numbers of layers are compiled; a step with all layers is extrapolated from them linearly.
LAYERS = (2, 4)

Program = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Row:
    """A published measurement, and how the same program is predicted.

    Attributes:
        title: The program.
        slice: The slice that it ran on.
        measured: The measured seconds, as the smallest and the largest published value.
        source: Where it was published.
        predict: Compiles and prices the program for that slice.
        differs: Known differences from the published run, apart from the versions of JAX and libtpu.
    """

    title: str
    slice: str
    measured: tuple[float, float]
    source: str
    predict: Callable[["Pricing"], Times]
    differs: tuple[str, ...] = ()


class Pricing:
    """Compiles programs for one described slice, and prices them."""

    def __init__(self, kind: str, cache: Path, calibration: Calibration | None = None) -> None:
        """Describe a slice. `cache` keeps kernels' bundles; a `calibration` replaces published figures."""
        self.slice = describe_slice(SliceSpec(kind), calibration)
        self._devices = self.slice.devices()
        self._kernels = KernelPrices(cache, self.slice.hardware, self.slice.cores, count_alone)

    def mesh(self, **axes: int) -> Mesh:
        """Return a mesh over the first devices of the slice."""
        devices = self._devices[: int(np.prod(list(axes.values())))]
        return Mesh(np.array(devices).reshape(*axes.values()), tuple(axes))

    def jax_mesh(self, **axes: int) -> Mesh:
        """Return a mesh over all devices in the order that JAX gives them."""
        return Mesh(mesh_utils.create_device_mesh(tuple(axes.values()), self._devices), tuple(axes))

    def cost(
        self,
        mesh: Mesh,
        program: Program,
        *,
        legacy: bool = False,
        flags: Mapping[str, Any] | None = None,
        prefer: Sequence[str] = (),
    ) -> Cost:
        """Return what a program costs.

        Args:
            mesh: The devices that it is compiled for.
            program: A function and its abstract arguments.
            legacy: Whether the mesh is set as JAX did before `jax.set_mesh`.
            flags: Flags of libtpu.
            prefer: As in `analyse`.
        """
        function, arguments = program
        with mesh if legacy else jax.set_mesh(mesh):
            lowered = jax.jit(function).lower(*arguments)
        text = lowered.compile(compiler_options=dict(flags or {})).as_text() or ""
        cost = analyse(
            text,
            self.slice.hardware,
            interconnect_of(self.slice, mesh),
            kernel_cycles=self._kernels,
            prefer=prefer,
            others=ATTENTION,
        )
        if cost.unpriced:
            raise ValueError(f"not priced: {', '.join(cost.unpriced)}")
        return cost

    def step(self, layers: int, of: Callable[[int], Program], mesh: Mesh) -> Times:
        """Return the seconds of a step with `layers` layers; `of` returns the program with a number of layers."""
        few, more = (self.cost(mesh, of(count)).total for count in LAYERS)
        return few + (more + few * -1) * ((layers - LAYERS[0]) / (LAYERS[1] - LAYERS[0]))
