"""The switches that leave kernels and overlapped exchanges out, as TPU programs have them."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from actors.cli import main
from cluster.slice_spec import SliceSpec
from wan_tpu.aot import key
from wan_tpu.errors import InvalidInput
from wan_tpu.ops.collectives import gather_rows
from wan_tpu.ops.dispatch import ops_for
from wan_tpu.runtime.program import Program
from wan_tpu.switches import COLLECTIVES, KERNELS, read_switches, set_switches, uses_kernel
from wan_tpu_kernels.catalogue import KERNELS as KNOWN
from wan_tpu_kernels.layer_norm import layer_norm
from wan_tpu_kernels.linear import linear, linear_reference


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    """What a test sets is put back."""
    monkeypatch.setenv(KERNELS, "own")
    monkeypatch.setenv(COLLECTIVES, "overlapped")


def test_kernels_are_left_out_one_by_one_or_all():
    assert ops_for("tpu").linear is linear
    set_switches(kernels="reference:linear,attention")
    assert ops_for("tpu").linear is linear_reference
    assert ops_for("tpu").layer_norm is layer_norm
    assert not uses_kernel("attention", "tpu")
    set_switches(kernels="reference")
    assert ops_for("tpu") == ops_for("cpu")
    assert not any(uses_kernel(name, "tpu") for name in KNOWN)
    set_switches(kernels="own")
    assert all(uses_kernel(name, "tpu") for name in KNOWN)


@pytest.mark.parametrize(
    ("switch", "message"),
    [
        ({"kernels": "plain"}, "--kernels.*'plain'.*own.*reference.*reference:NAME,NAME"),
        ({"kernels": "reference:linaer"}, r"'linaer'.*\blinear\b"),
        ({"collectives": "slow"}, "--collectives.*'slow'.*overlapped.*synchronous"),
    ],
)
def test_unknown_switch_is_refused(switch, message):
    with pytest.raises(InvalidInput, match=message):
        set_switches(**switch)
    assert read_switches() == {"kernels": "own", "collectives": "overlapped"}


def test_executables_are_of_their_switches():
    before = key.describe_build()
    set_switches(kernels="reference", collectives="synchronous")
    assert key.list_differences(before, key.describe_build()) == [
        "collectives is synchronous, was overlapped",
        "kernels is reference, was own",
    ]


@pytest.mark.loads_libtpu
@pytest.mark.parametrize("kind", ["v6e-4", pytest.param("v7x-4", marks=pytest.mark.long)])
def test_tpu_programs_send_as_they_are_told(kind):
    pytest.importorskip("libtpu", reason="needs libtpu: pip install '.[tpu]'")
    from actors.planning.slice_description import describe_slice

    devices = describe_slice(SliceSpec(kind)).devices()
    mesh = Mesh(np.array(devices), ("x",))
    x = jax.ShapeDtypeStruct((4096, 512), np.float32, sharding=jax.sharding.NamedSharding(mesh, P("x")))

    def compile_program():
        def local(x):
            y = jax.lax.all_to_all(x, "x", split_axis=0, concat_axis=0, tiled=True)
            return gather_rows(y, ("x",), "tpu") + 1

        whole = jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
        return Program(whole, mesh, exact=True).compile(x).as_text()

    overlapped = compile_program()
    assert "all-to-all-start" in overlapped and "ragged-all-to-all" in overlapped
    assert "sparsecore" not in overlapped  # What runs is what is priced.
    set_switches(collectives="synchronous")
    synchronous = compile_program()
    assert "all-to-all-start" not in synchronous and "ragged-all-to-all" not in synchronous


def test_command_refuses_an_unknown_kernel_before_anything_is_read(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    command = ["generate", "--model", str(tmp_path / "model"), "--prompt", "x", "--kernels", "reference:atention"]
    assert main([*command, "--output", str(tmp_path / "x.mp4")]) == 2
    assert "'atention' (did you mean attention?)" in capsys.readouterr().err
