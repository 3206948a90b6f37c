"""Compiled programs, with their compile time kept apart from their run time."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from wan_tpu.aot.executables import Executables
from wan_tpu.aot.key import placed
from wan_tpu.mesh import replicated

# Off by default in libtpu: the exchange of q is then sent while k is projected, and so on.
TPU_OPTIONS: dict[str, str | bool] = {"xla_tpu_enable_async_all_to_all": "true"}

_tracing = threading.Lock()  # a module's weights are swapped while it is traced: one thread at a time


class Program:
    """A jitted function over one mesh that times its own compilations.

    Recompiles for: new array shapes, dtypes or shardings, and nothing else (numbers are passed as arrays).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        mesh: Mesh,
        *,
        exact: bool,
        results: Any = None,
        name: str = "",
        executables: Executables | None = None,
    ) -> None:
        """exact: multiply float32 in float32; TPUs and GPUs otherwise take bfloat16 or TF32 passes.

        results      shardings, or formats, of what is returned, where they matter (a tree, or its beginning)
        executables  where compiled programs are looked for, under `name`, before one is compiled
        """
        self.function = function
        self._jit = jax.jit(function, out_shardings=results)
        self._mesh = mesh
        self._options = TPU_OPTIONS if mesh.devices.flat[0].platform == "tpu" else None
        self._precision = "highest" if exact else "default"
        self._name = f"{name}, {self._precision} precision"
        self._executables = executables
        self._compiled: dict[Any, Any] = {}
        self._known: dict[Any, Any] = {}  # the same by shardings as they are spelt, which is quicker to look up
        self.compile_s = 0.0  # summed over all compilations

    def __call__(self, *args: Any) -> Any:
        """Run; array leaves must be on the mesh (`place`)."""
        return self.compile(*args)(*args)

    def compile(self, *args: Any) -> Any:
        """Return the executable for arguments (arrays, or shapes with shardings) like these."""
        leaves, tree = jax.tree.flatten(args)
        spelt = (tree, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
        with _tracing:
            if spelt not in self._known:
                # Results come back with axes of size 1 left out of their shardings: nothing to compile anew for.
                key = (tree, tuple((leaf.shape, leaf.dtype, placed(leaf.sharding)) for leaf in leaves))
                if key not in self._compiled:
                    self._compiled[key] = self._get(args)
                self._known[spelt] = self._compiled[key]
            return self._known[spelt]

    def _get(self, args: tuple[Any, ...]) -> Any:
        if self._executables is None:
            return self._build(args)
        return self._executables.get(self._name, args, self._mesh, lambda: self._build(args))

    def _build(self, args: tuple[Any, ...]) -> Any:
        start = time.perf_counter()
        with jax.default_matmul_precision(self._precision), jax.set_mesh(self._mesh):
            compiled = self._jit.lower(*args).compile(compiler_options=self._options)
        self.compile_s += time.perf_counter() - start
        return compiled


def place(tree: Any, mesh: Mesh) -> Any:
    """Copy host arrays (and numbers) to every device of `mesh`; on several processes, each gives the same values.

    No collective: any thread may call it while a program runs. On CPU an array may go on using the host's memory.
    """
    whole = replicated(mesh)
    if whole.is_fully_addressable:
        return jax.device_put(tree, whole)

    def copy(value: Any) -> jax.Array:  # device_put would compare the processes' values first, by a collective
        array = np.asarray(value)
        return jax.make_array_from_callback(array.shape, whole, lambda _: array, array.dtype)

    return jax.tree.map(copy, tree)
