"""What a device has no memory for fails as a request that doesn't fit, wherever JAX says so."""

import gc
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from wan_tpu.errors import DoesNotFit
from wan_tpu.families.model import published_model
from wan_tpu.runtime import program as program_module
from wan_tpu.runtime import runtime as runtime_module
from wan_tpu.runtime.mesh import make_mesh
from wan_tpu.runtime.program import Program, fetch, place
from wan_tpu_kernels.two_blocks import plan_vmem

MORE = 2**45  # elements: more than any address space


@pytest.fixture
def mesh():
    return make_mesh((1, 1, 1), heads=1)


def test_a_program_that_a_device_has_no_room_for(mesh):
    program = Program(lambda x: jnp.broadcast_to(x, (MORE,)) + 1, mesh, exact=True, name="spread")
    with pytest.raises(DoesNotFit, match=r"^spread of float32 \[1\] .*alloc"):
        program(place(np.float32([1]), mesh))


def test_a_program_with_a_kernel_that_a_chip_has_no_room_for(mesh):
    def attend(x):
        plan_vmem(2**20, 128, jnp.bfloat16, beside=0)
        return x

    with pytest.raises(DoesNotFit, match=r"^step: .* 512 MiB.* 64\b"):
        Program(attend, mesh, exact=True, name="step")(place(np.float32([1]), mesh))


def test_one_that_fails_when_its_result_is_awaited(mesh):
    program = Program(lambda x: jnp.sort(x[0] + jnp.arange(MORE)).sum(), mesh, exact=True, name="sum")
    result = program(place(np.float32([1]), mesh))
    with pytest.raises(DoesNotFit, match=r"^sum .*alloc"):
        fetch(result, "sum")


def test_it_says_when_it_compiles(mesh):
    names = []
    program = Program(lambda x: x + 1, mesh, exact=True, name="one more", on_compile=names.append)
    for length in (2, 2, 3):
        program(place(np.ones(length, np.float32), mesh))
    assert names == ["one more", None] * 2
    with pytest.raises(TypeError):
        Program(lambda x: x + jnp.ones(3), mesh, exact=True, on_compile=names.append)(
            place(np.ones(2, np.float32), mesh)
        )
    assert names[-1] is None


def test_executables_that_are_not_used_any_more_are_dropped(mesh, monkeypatch):
    monkeypatch.setattr(program_module, "MAX_SIZES", 4)
    names, device = [], mesh.devices.flat[0]
    program = Program(lambda x: x + 2, mesh, exact=True, on_compile=names.append)
    before = device.client.live_executables()  # Of other tests: they stay as long as this does.
    for length in range(1, 10):
        program(place(np.ones(length, np.float32), mesh))
        program(place(np.ones(1, np.float32), mesh))  # used all along, so it stays
    gc.collect()
    assert len(device.client.live_executables()) - len(before) == 4
    assert names.count(None) == 9
    program(place(np.ones(2, np.float32), mesh))
    assert names.count(None) == 10


def test_programs_that_are_not_used_any_more_are_dropped(mesh, monkeypatch):
    """Their seconds stay counted: a request's are the difference before and after."""
    monkeypatch.setattr(runtime_module, "MAX_PROGRAMS", 2)
    runtime = runtime_module.Runtime(published_model("wan2.1-t2v-1.3b"), mesh, "float32", keep_weights=True)
    compiled, seconds = [], [0.0]
    runtime.on_compile = compiled.append
    for name in ("first", "second", "first", "third", "first", "second"):  # "first" is used all along, so it stays
        runtime.program(name, lambda x: x + 1)(place(np.ones(2, np.float32), mesh))
        seconds.append(runtime.compile_s)
    assert [name for name in compiled if name is not None] == ["first", "second", "third", "second"]
    assert list(runtime.programs) == ["first", "second"]
    assert seconds == sorted(seconds) and len(set(seconds)) == 5


def test_other_failures_stay_what_they_are(mesh):
    with pytest.raises(TypeError, match="incompatible shapes"):
        Program(lambda x: x + jnp.ones(3), mesh, exact=True)(place(np.ones(2, np.float32), mesh))


def test_an_interruption_loses_no_program(mesh):
    """Python interrupts the main thread when a function begins, and after the call of a built-in one."""
    runtime = runtime_module.Runtime(published_model("wan2.1-t2v-1.3b"), mesh, "float32", keep_weights=True)
    x, calls = place(np.ones(2, np.float32), mesh), 0

    def run():
        return runtime.program("double", lambda x: 2 * x)(x)

    def interrupt(frame, event, _):
        nonlocal calls
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(("program.py", "runtime.py")):
            calls -= 1
            if calls == 0:
                raise KeyboardInterrupt

    run()
    compiled, stop, was_interrupted = runtime.compile_s, 0, True
    while was_interrupted:
        stop += 1
        calls, was_interrupted = stop, False
        sys.setprofile(interrupt)
        try:
            run()
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            sys.setprofile(None)
        run()
        assert runtime.compile_s == compiled, stop
    assert stop > 10
