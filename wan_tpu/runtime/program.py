"""Compiled programs, with their compile time kept apart from their run time."""

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from wan_tpu.errors import CompileFailed, DoesNotFit
from wan_tpu.runtime.memory import GIB, read_refusal
from wan_tpu.runtime.mesh import describe_sharding, replicated_sharding
from wan_tpu.switches import is_synchronous
from wan_tpu_kernels.two_blocks import NoRoom

# By default some TPUs run these collectives on SparseCores (`sparse_core_collectives` in cluster/generations/). An
# all-to-all then overlaps with nothing, and JAX 0.10 can't read the program's schedule for a plan. Both variants are
# predicted to take the same time (2.140 and 2.142 s for a step of 14B on 4 chips), so programs run them the way that
# plans price them: on the TensorCore, in the background. For other TPUs the options change nothing.
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
    """Return the compiler's options for a mesh's devices; None if there are none.

    With `sparse_cores`, SparseCores may run collectives, which is the compiler's default: `wan-tpu doctor` tries both.
    """
    if mesh.devices.flat[0].platform != "tpu":
        return None
    # This is off by default in libtpu. With it, q is exchanged while k is projected, and so on.
    options: dict[str, str | bool] = {"xla_tpu_enable_async_all_to_all": "false" if is_synchronous() else "true"}
    return options | ({} if sparse_cores else ON_TENSOR_CORE)


# Each program, such as the denoising step, keeps executables for this many sizes. The least recently used one is
# dropped, and compiled or loaded again when it is needed. Without a limit, executables would fill the memory of the
# host and the TPU.
MAX_SIZES = 16

_tracing = threading.Lock()  # A module's weights are swapped while it is traced: one thread at a time.


class ExecutableStore(Protocol):
    """A store of compiled programs: `wan_tpu.aot.executables.Executables`."""

    def get(self, name: str, args: Any, mesh: Mesh, build: Callable[[], Any]) -> Any:
        """Return a program's executable for such arguments; `build` is called if none is stored."""


class Program:
    """A jitted function over one mesh that times its own compilations.

    It recompiles for new array shapes, dtypes or shardings, and for nothing else (numbers are passed as arrays).
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
        on_compile: Callable[[str | None], object] = lambda name: None,
    ) -> None:
        """Wrap a function; nothing is compiled yet.

        Args:
            exact: Multiply float32 values in float32; otherwise TPUs and GPUs use bfloat16 or TF32 passes.
            results: Shardings or formats of the results, if they matter (a pytree, or a prefix of one).
            executables: Where to look for a compiled program, under `name`, before compiling one.
            on_compile: Called with the name before the program is compiled, and with None after.
        """
        self.function = function
        self._results = results
        self._mesh = mesh
        self._options = compiler_options(mesh)
        self._precision = "highest" if exact else "default"
        self._name, self._on_compile = name, on_compile
        self._executables = executables
        self._compiled: OrderedDict[Any, Any] = OrderedDict()  # The most recently used one comes last.
        self._keys: dict[Any, Any] = {}  # Keyed by shardings as they are written, which is quicker to look up.
        self.compile_s = 0.0  # Summed over all compilations.

    def __call__(self, *args: Any) -> Any:
        """Run the program; array leaves must be on the mesh (`place`).

        Raises:
            DoesNotFit: A device has too little memory. On a TPU this may be raised only later, by `fetch`.
            CompileFailed: The compiler refuses the program for another reason.
        """
        compiled = self.compile(*args)
        with _explain_memory(self._name, args):
            return compiled(*args)

    def compile(self, *args: Any) -> Any:
        """Return the executable for arguments (arrays, or shapes with shardings) like these.

        Raises:
            DoesNotFit: It needs more memory than a device has.
            CompileFailed: The compiler refuses it for another reason.
        """
        leaves, tree = jax.tree.flatten(args)
        signature = (tree, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
        with _tracing:
            # Results come back without axes of size 1 in their shardings; that must not trigger a recompilation.
            key = self._keys.get(signature) or (
                tree,
                tuple((leaf.shape, leaf.dtype, describe_sharding(leaf.sharding)) for leaf in leaves),
            )
            compiled = self._compiled.get(key)  # It is never taken out: Ctrl-C may come at any time.
            if compiled is None:
                self._compiled[key] = compiled = self._get(args)
            self._compiled.move_to_end(key)
            self._keys[signature] = key
            if len(self._compiled) > MAX_SIZES:
                self._compiled.popitem(last=False)
                self._keys = {signature: key for signature, key in self._keys.items() if key in self._compiled}
            return compiled

    def _get(self, args: tuple[Any, ...]) -> Any:
        if self._executables is None:
            return self._build(args)
        name = f"{self._name}, {self._precision} precision"
        return self._executables.get(name, args, self._mesh, lambda: self._build(args))

    def _build(self, args: tuple[Any, ...]) -> Any:
        start = time.perf_counter()
        self._on_compile(self._name)
        try:
            compiled = self.compile_lowered(self.lower(*args), *args)
        finally:
            self._on_compile(None)
        self.compile_s += time.perf_counter() - start
        return compiled

    def lower(self, *args: Any) -> Any:
        """Return the traced program for arguments like these, which isn't kept; errors are those of `compile`."""

        # JAX keeps its traces of a function for as long as the function exists: each size has its own.
        @functools.wraps(self.function)
        def function_of_size(*args: Any) -> Any:
            return self.function(*args)

        with self._explain(args):
            return jax.jit(function_of_size, out_shardings=self._results).lower(*args)

    def compile_lowered(self, lowered: Any, *args: Any) -> Any:
        """Return the executable of what `lower` returned for arguments, which isn't kept; errors: as of `compile`."""
        with self._explain(args):
            return lowered.compile(compiler_options=self._options)

    @contextmanager
    def _explain(self, args: tuple[Any, ...]) -> Iterator[None]:
        try:
            with (
                jax.default_matmul_precision(self._precision),
                jax.set_mesh(self._mesh),
                _explain_memory(self._name, args),
            ):
                yield
        except NoRoom as error:
            raise DoesNotFit(f"{self._name}: {error}") from error
        except jax.errors.JaxRuntimeError as error:
            raise CompileFailed(f"{self._name} can't be compiled: {str(error).splitlines()[0]}") from error


def fetch(result: jax.Array, name: str) -> np.ndarray:
    """Wait for a result of the program `name`, of which every device has a complete copy, and copy it to the host.

    Raises:
        DoesNotFit: A device had too little memory for the program that computes it.
    """
    with _explain_memory(name):
        return np.asarray(result)


@contextmanager
def _explain_memory(name: str, args: tuple[Any, ...] = ()) -> Iterator[None]:
    """Raise `DoesNotFit` if the compiler or a device refuses a program with arguments `args` for lack of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        # JAX has a single class for all errors of compilers and devices.
        if not message.startswith("RESOURCE_EXHAUSTED"):
            raise
        # If there are several arguments, the first one is the weights.
        shape = "".join(f" of {x.dtype} {list(x.shape)}" for x in jax.tree.leaves(args[1:] or args)[:1])
        needed, available = read_refusal(message)
        if needed is None or available is None:
            reason = f"needs more memory than a device has: {message.splitlines()[0]}"
        else:
            reason = f"needs {needed / GIB:.1f} GiB on each device, which has {available / GIB:.1f}"
        raise DoesNotFit(f"{name}{shape} {reason}", needed, available) from error


def place(tree: Any, mesh: Mesh, sharding: NamedSharding | None = None) -> Any:
    """Copy host arrays (and numbers) to every device of `mesh`. With several processes, each passes the same values.

    This isn't a collective: any thread may call it while a program runs. On the CPU an array may share the host's
    memory.

    Args:
        sharding: How arrays are split instead, if not every device gets all of them.
    """
    sharding = sharding or replicated_sharding(mesh)
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    # device_put would compare the processes' values first, by a collective.
    def copy(value: Any) -> jax.Array:
        array = np.asarray(value)
        return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part], array.dtype)

    return jax.tree.map(copy, tree)
