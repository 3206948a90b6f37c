"""Where a program's seconds go, from the profiler's own trace; and which collectives SparseCores may run."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from actors.doctor import collectives
from actors.doctor.trace import sum_categories
from actors.planning.slice_description import describe_slice
from cluster.slice_spec import SliceSpec
from tests.children import run_module
from tests.conftest import with_devices

# As the profiler writes a TPU's: a row of operations for each device, with others beside it that cover the same time.
ROWS = [
    {"ph": "M", "pid": device, "tid": row, "name": "thread_name", "args": {"name": name}}
    for device in (3, 4)
    for row, name in ((1, "Steps"), (2, "XLA Modules"), (3, "XLA Ops"))
]


def event(device, row, microseconds, name, **args):
    return {"ph": "X", "pid": device, "tid": row, "ts": 0, "dur": microseconds, "name": name, "args": args}


def test_seconds_of_a_tpu_trace_are_those_of_its_operations():
    events = [
        *ROWS,
        event(3, 1, 900, "1"),
        event(3, 2, 900, "jit_step"),
        event(3, 3, 600, "fusion.12", hlo_category="convolution fusion"),
        event(3, 3, 200, "all-to-all.3", hlo_category="all-to-all"),
        event(4, 3, 400, "fusion.12", hlo_category="convolution fusion"),
    ]
    assert sum_categories(events, 2) == pytest.approx({"convolution fusion": 500e-6, "all-to-all": 100e-6})


@pytest.mark.thorough
def test_trace_of_this_machine_has_its_operations():
    """In a process of its own: what has loaded libtpu can't trace without a TPU."""
    run_module("tests.actors.trace_worker", environment=with_devices(2))


@pytest.mark.loads_libtpu
def test_sparse_cores_are_used_where_the_doctor_lets_them():
    pytest.importorskip("libtpu", reason="needs libtpu: pip install '.[tpu]'")
    mesh = Mesh(np.array(describe_slice(SliceSpec("v7x-4")).devices()), (collectives.AXIS,))
    gather = collectives._list_kinds(mesh.size, "tpu")["all-gather"][0]
    shape = (8192 * mesh.size, collectives.WIDTH)
    rows = jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, P(collectives.AXIS)))
    for allowed in (False, True):
        program = collectives._compile(gather, mesh, sparse_cores=allowed).lower(rows).compile()
        assert ("sparsecore" in program.as_text()) == allowed
