"""Everything that pricing uses of JAX that isn't public: any version may change it.

`jax.extend` reads MLIR. Only jaxlib registers the dialect in which Pallas writes kernels for TPUs.
"""

import sys
from types import ModuleType

from jax.extend.lowering import JaxIrContext, upstream_dialects
from jaxlib.mosaic.python import tpu

# Kernels are stored in a dialect that has no Python module. Without one, each operation that is looked at would search
# for it in vain, which takes 28 times as long as all else that reads a kernel.
sys.modules.setdefault("jaxlib.mlir.dialects.stable_mosaic", ModuleType("stable_mosaic"))


def make_kernel_context() -> JaxIrContext:
    """Return a context that reads the kernels of a compiled TPU program."""
    context = JaxIrContext()
    context.append_dialect_registry(upstream_dialects)
    context.load_all_available_dialects()
    tpu.register_dialect(context)
    context.allow_unregistered_dialects = True
    return context
