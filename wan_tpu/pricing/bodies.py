"""Compile programs without the bodies of their Pallas kernels, which take most of the compiler's time.

Around a kernel, the compiler sees the operands, the results, and the configuration: the cost that the kernel states and
the VMEM that it asks for. The body changes nothing there, so the schedule is the same without it. The bodies are put
back into the scheduled HLO, and each is compiled once for all programs that have it (`kernel_prices`).
"""

import base64
import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.mlir import ir

from wan_tpu.pricing.jax_private import make_kernel_context

_TARGET = "tpu_custom_call"
_INDEX_MAP = "transform_"  # Begins the names of functions that find a grid step's blocks. They stay as they are.


def take_bodies(lowered: Any) -> Mapping[str, str]:
    """Empty the kernels of a traced program (`jax.stages.Lowered`); return their bodies by what is there instead."""
    bodies: dict[str, str] = {}
    emptied: dict[str, str] = {}
    for call in _walk_kernels(lowered.compiler_ir().operation):
        with call.context:
            settings = json.loads(ir.StringAttr(call.attributes["backend_config"]).value)
        kernel = settings["custom_call_config"]
        body = kernel["body"]
        if body not in emptied:
            emptied[body] = _empty(body)
            bodies[emptied[body]] = body
        kernel["body"] = emptied[body]
        kernel.pop("debug_locations", None)  # Those of the body's lines, which must be as many.
        with call.context:
            call.attributes["backend_config"] = ir.StringAttr.get(json.dumps(settings))
    return bodies


def put_bodies(hlo: str, bodies: Mapping[str, str]) -> str:
    """Return the HLO of a program with the bodies that `take_bodies` returned."""
    for emptied, body in bodies.items():
        hlo = hlo.replace(emptied, body)
    return hlo


def _walk_kernels(operation: Any) -> Iterator[Any]:
    if operation.name.endswith(".custom_call"):
        with operation.context:
            if ir.StringAttr(operation.attributes["call_target_name"]).value == _TARGET:
                yield operation
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _walk_kernels(inner.operation)


def _empty(body: str) -> str:
    """Return a kernel that does nothing, with the same blocks. Different kernels stay different."""
    with make_kernel_context(), ir.Location.unknown():
        module = ir.Module.parse(base64.b64decode(body))
        module.operation.attributes["wan_tpu.body"] = ir.StringAttr.get(hashlib.sha256(body.encode()).hexdigest())
        for function in module.body.operations:
            if not ir.StringAttr(function.attributes["sym_name"]).value.startswith(_INDEX_MAP):
                [block] = function.regions[0].blocks
                *work, _ = block.operations
                for operation in reversed(work):
                    operation.operation.erase()
        empty = io.BytesIO()
        module.operation.write_bytecode(empty, desired_version=0)
    return base64.b64encode(empty.getvalue()).decode()
