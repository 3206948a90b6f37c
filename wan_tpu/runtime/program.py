"""Compiled programs, with their compile time kept apart from their run time."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from wan_tpu.errors import CompileFailed, DoesNotFit
from wan_tpu.runtime.memory import GIB, read_refusal
from wan_tpu.runtime.mesh import placed, replicated
from wan_tpu.switches import is_synchronous

# TPUs with new SparseCores (v7x) hand these to them unless told otherwise, where an all-to-all becomes one that nothing
# overlaps, and JAX 0.10 can't read the program's schedule for a plan. Both are predicted to take the same time (2.140
# and 2.142 s for a step of A14B on v7x-4), so what runs is what is priced: on the TensorCore, in the background. For
# other TPUs the compiler makes the same program with these options as without.
_OFFLOADED = (
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "nd_reduce_scatter",
    "dense_all_to_all",
    "ragged_all_to_all",
)
ON_TENSOR_CORE: dict[str, str | bool] = {
    **{f"xla_tpu_enable_sparse_core_collective_offload_{kind}": "false" for kind in _OFFLOADED},
    "xla_tpu_enable_sparse_core_async_all_to_all": "false",
}


def compiler_options(mesh: Mesh, *, sparse_cores: bool = False) -> dict[str, str | bool] | None:
    """Return the compiler's options for a mesh's devices; None where there are none.

    With `sparse_cores`, these may run collectives, as the compiler would have it: `wan-tpu doctor` tries both.
    """
    if mesh.devices.flat[0].platform != "tpu":
        return None
    # Off by default in libtpu: the exchange of q is then sent while k is projected, and so on.
    options: dict[str, str | bool] = {"xla_tpu_enable_async_all_to_all": "false" if is_synchronous() else "true"}
    return options | ({} if sparse_cores else ON_TENSOR_CORE)


# A program, the denoising step for example, keeps executables of so many sizes. The one that was used least recently
# goes, and is compiled or loaded again when it is asked for. Without a bound they would fill the host and the TPU.
MAX_SIZES = 16

_tracing = threading.Lock()  # a module's weights are swapped while it is traced: one thread at a time


class ExecutableStore(Protocol):
    """Where compiled programs are kept: `wan_tpu.aot.executables.Executables`."""

    def get(self, name: str, args: Any, mesh: Mesh, build: Callable[[], Any]) -> Any:
        """Return the executable of a program for arguments like these; `build` is called when none is stored."""


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
        executables: ExecutableStore | None = None,
        told: Callable[[str | None], object] = lambda name: None,
    ) -> None:
        """exact: multiply float32 in float32; TPUs and GPUs otherwise take bfloat16 or TF32 passes.

        results      shardings, or formats, of what is returned, where they matter (a tree, or its beginning)
        executables  where compiled programs are looked for, under `name`, before one is compiled
        told         given the name before it is compiled, and None after
        """
        self.function = function
        self._results = results
        self._mesh = mesh
        self._options = compiler_options(mesh)
        self._precision = "highest" if exact else "default"
        self._name, self._told = name, told
        self._executables = executables
        self._compiled: dict[Any, Any] = {}  # The one used last comes last.
        self._keys: dict[Any, Any] = {}  # By shardings as they are spelt, which is quicker to look up.
        self.compile_s = 0.0  # summed over all compilations

    def __call__(self, *args: Any) -> Any:
        """Run; array leaves must be on the mesh (`place`). Raises `DoesNotFit`, on a TPU perhaps only in `fetch`."""
        compiled = self.compile(*args)
        with _memory(self._name, args):
            return compiled(*args)

    def compile(self, *args: Any) -> Any:
        """Return the executable for arguments (arrays, or shapes with shardings) like these.

        Raises `DoesNotFit`, `CompileFailed`.
        """
        leaves, tree = jax.tree.flatten(args)
        spelt = (tree, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
        with _tracing:
            # Results come back with axes of size 1 left out of their shardings: nothing to compile anew for.
            key = self._keys.get(spelt) or (
                tree,
                tuple((leaf.shape, leaf.dtype, placed(leaf.sharding)) for leaf in leaves),
            )
            compiled = self._compiled.pop(key, None)
            self._compiled[key] = compiled = self._get(args) if compiled is None else compiled
            self._keys[spelt] = key
            if len(self._compiled) > MAX_SIZES:
                del self._compiled[next(iter(self._compiled))]
                self._keys = {spelt: key for spelt, key in self._keys.items() if key in self._compiled}
            return compiled

    def _get(self, args: tuple[Any, ...]) -> Any:
        if self._executables is None:
            return self._build(args)
        name = f"{self._name}, {self._precision} precision"
        return self._executables.get(name, args, self._mesh, lambda: self._build(args))

    def _traced(self, args: tuple[Any, ...]) -> Any:
        @functools.wraps(self.function)
        def of_this_size(*args: Any) -> Any:  # JAX keeps what it makes of a function for as long as that is there.
            return self.function(*args)

        return jax.jit(of_this_size, out_shardings=self._results).lower(*args)

    def _build(self, args: tuple[Any, ...]) -> Any:
        start = time.perf_counter()
        self._told(self._name)
        try:
            with jax.default_matmul_precision(self._precision), jax.set_mesh(self._mesh), _memory(self._name, args):
                compiled = self._traced(args).compile(compiler_options=self._options)
        except jax.errors.JaxRuntimeError as error:
            raise CompileFailed(f"{self._name} can't be compiled: {str(error).splitlines()[0]}") from error
        finally:
            self._told(None)
        self.compile_s += time.perf_counter() - start
        return compiled


def fetch(result: jax.Array, name: str) -> np.ndarray:
    """Wait for a result of the program called `name`, whole on every device, and copy it to the host.

    Raises `DoesNotFit` when a device had no room for what computes it.
    """
    with _memory(name):
        return np.asarray(result)


@contextmanager
def _memory(name: str, args: tuple[Any, ...] = ()) -> Iterator[None]:
    """Raise `DoesNotFit` for what a compiler or a device refuses for memory; args: what a program is given."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if not message.startswith("RESOURCE_EXHAUSTED"):  # JAX has one class for all that a compiler or device says
            raise
        # The first argument is the weights, where there are several.
        of = "".join(f" of {x.dtype} {list(x.shape)}" for x in jax.tree.leaves(args[1:] or args)[:1])
        needed, available = read_refusal(message)
        if needed is None or available is None:
            reason = f"needs more memory than a device has: {message.splitlines()[0]}"
        else:
            reason = f"needs {needed / GIB:.1f} GiB a device of {available / GIB:.1f}"
        raise DoesNotFit(f"{name}{of} {reason}", needed, available) from error


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
