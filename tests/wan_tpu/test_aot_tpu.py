"""Programs compiled for TPUs that aren't there, by libtpu's own compiler."""

import dataclasses
import json
import math
import os
import pickle
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cluster.slice_spec import SliceSpec
from tests.conftest import ROOT
from wan_tpu import GenerationRequest
from wan_tpu.aot import key
from wan_tpu.aot.executables import SUFFIX, Executables
from wan_tpu.aot.programs import AbstractRuntime, stage_programs
from wan_tpu.errors import DoesNotFit, InvalidInput
from wan_tpu.families.model import published_model
from wan_tpu.pricing.analyse import analyse
from wan_tpu.pricing.bodies import put_bodies, take_bodies
from wan_tpu.pricing.compiling import describe_refusal
from wan_tpu.pricing.hlo import parse
from wan_tpu.pricing.ici import interconnect_of
from wan_tpu.pricing.kernel_calls import list_kernel_calls
from wan_tpu.pricing.kernel_prices import KernelPrices, count_alone
from wan_tpu.pricing.probe import type_of_8_bits
from wan_tpu.runtime.components import abstract_component
from wan_tpu.runtime.memory import GIB
from wan_tpu.runtime.mesh import make_mesh
from wan_tpu.runtime.program import Program
from wan_tpu_kernels.linear import linear

pytest.importorskip("libtpu", reason="needs libtpu: pip install '.[tpu]'")
from actors.planning.slice_description import describe_slice
from cluster.chips import ANNOUNCED
from wan_tpu.versions import installed_version

pytestmark = pytest.mark.loads_libtpu

LAYERS, TOKENS, WIDTH = 3, 2048, 512


@pytest.fixture(scope="module")
def v6e_4():
    return describe_slice(SliceSpec("v6e-4"))


@pytest.fixture(scope="module")
def mesh(v6e_4):
    return Mesh(np.array(v6e_4.devices()).reshape(4), ("tp",))


@pytest.mark.parametrize(
    ("name", "devices"), [("v6e-8", 8), ("v5e-4", 4), ("v5p-8", 4), ("v6e-16", 16), ("v7x-4", 8), ("v6e-1", 1)]
)
def test_kinds_of_slices_are_known_to_the_compiler(name, devices):
    kind = SliceSpec(name)
    described_devices = describe_slice(kind).devices()
    assert len(described_devices) == devices == kind.devices
    assert len({device.process_index for device in described_devices}) == kind.hosts
    assert described_devices[0].device_kind == kind.chip.jax_kind
    assert jnp.dtype(type_of_8_bits(described_devices[0])).name == kind.chip.mxu_8bit_dtype


def test_an_unknown_topology_is_refused(v6e_4):
    with pytest.raises(InvalidInput, match="v6e:3x7"):
        dataclasses.replace(v6e_4, topology="v6e:3x7").devices()


@pytest.mark.parametrize("chip", ANNOUNCED.values(), ids=ANNOUNCED)
def test_announced_generation_is_still_refused(chip, v6e_4):
    """If it isn't any more, its file moves to cluster/generations/, and gets the shapes and links of its slices."""
    with pytest.raises(InvalidInput, match=chip.compiler):
        dataclasses.replace(v6e_4, topology=f"{chip.compiler}:2x2").devices()
    assert chip.refused_by == f"libtpu {installed_version('libtpu')}"


def test_what_is_compiled_without_chips_has_the_flags_of_a_host_with_chips(v6e_4):
    """There JAX adds a flag of its own when it is imported; an executable without it would be used on no TPU."""
    v6e_4.devices()
    environment = {name: value for name, value in os.environ.items() if name != "LIBTPU_INIT_ARGS"}
    command = [sys.executable, "-c", "import json, wan_tpu.aot.key as key; print(json.dumps(key.describe_build()))"]
    child = subprocess.run(
        command, cwd=ROOT, env=environment | {"JAX_FORCE_TPU_INIT": "1"}, capture_output=True, text=True, check=True
    )
    assert "launch_barrier=true" in json.loads(child.stdout)["LIBTPU_INIT_ARGS"]
    assert key.list_differences(key.describe_build(), json.loads(child.stdout)) == []


def layers(x, weights):
    """A column-parallel and a row-parallel product a layer: one all-reduce each."""

    def layer(x, pair):
        up, down = pair
        return x + jnp.maximum(x @ up, 0) @ down, None

    return jax.lax.scan(layer, x, weights)[0]


@pytest.fixture(scope="module")
def compiled_layers(mesh):
    def array(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    up, down = (LAYERS, WIDTH, 4 * WIDTH), (LAYERS, 4 * WIDTH, WIDTH)
    weights = (array(*up, spec=P(None, None, "tp")), array(*down, spec=P(None, "tp", None)))
    program = Program(layers, mesh, exact=False)
    return program.compile(array(TOKENS, WIDTH, spec=P()), weights)


def test_a_scanned_layer_is_found_with_its_work_and_its_collective(compiled_layers, mesh, v6e_4):
    cost = analyse(
        compiled_layers.as_text(), v6e_4.hardware, interconnect_of(v6e_4, mesh), kernel_cycles=lambda call: None
    )
    assert cost.unpriced == ()
    assert cost.matmul_flops == LAYERS * 2 * 2 * TOKENS * WIDTH * WIDTH  # of 4 WIDTH hidden units a quarter each
    [(body, trips)] = cost.loops()
    assert trips == LAYERS
    inside = cost.by_category(body)
    assert inside["matmul"].estimate > cost.matmul_flops / v6e_4.hardware.peak_flops
    # 2 MB reduced on a block of 2x2: three quarters out and back, over two links.
    links = LAYERS * 2 * 0.75 * TOKENS * WIDTH * 2 / (2 * v6e_4.link_bytes_per_s)
    moved = [item for item in cost.items if item.category == "collectives" and item.where == body]
    assert sum(item.seconds.estimate + item.hidden_s.estimate for item in moved) == pytest.approx(links, rel=1e-3)


def test_a_tpu_program_is_stored(compiled_layers, mesh, tmp_path):
    """It can't be loaded without a TPU: only that it is whole, under its key, is tested."""
    stored = Executables(tmp_path, "settings", save=True)
    argument = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=NamedSharding(mesh, P()))
    assert stored.get("layers", (argument,), mesh, lambda: compiled_layers) is compiled_layers
    [file] = tmp_path.glob(f"*{SUFFIX}")
    head, _, payload = file.read_bytes().partition(b"\n")
    assert b"TPU v6 lite" in head
    executable, _, _ = pickle.loads(payload)
    assert len(executable) > 10_000


def test_a_kernel_in_a_program_is_counted_alone(mesh, v6e_4, tmp_path):
    """Twice the rows a grid step are more bundles a step and fewer in all; grid and name come from the program."""

    def add_one(x, y):
        y[...] = x[...] + 1

    def program(rows):
        block = pl.BlockSpec((rows, 512), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
        run = pl.pallas_call(add_one, shape, grid=(1024 // rows,), in_specs=[block], out_specs=block, name="add_one")
        device_mesh = Mesh(mesh.devices[:1], ("tp",))
        argument = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(device_mesh, P()))
        return Program(lambda x: run(x) * 2, device_mesh, exact=False).compile(argument).as_text(), device_mesh

    prices = KernelPrices(tmp_path, v6e_4.hardware, 1, count_alone)
    cycles = {}
    for rows in (128, 256):
        text, device_mesh = program(rows)
        cost = analyse(text, v6e_4.hardware, interconnect_of(v6e_4, device_mesh), kernel_cycles=prices)
        [item] = [item for item in cost.items if item.kernel is not None]
        assert (item.kernel.name, item.kernel.grid) == ("add_one", (1024 // rows,))
        cycles[rows] = prices.bundles(item.kernel).products
        bundles_s = cycles[rows] * math.prod(item.kernel.grid) / v6e_4.hardware.clock_hz
        assert item.seconds.estimate == max(bundles_s, item.hbm_bytes / v6e_4.hardware.hbm_bytes_per_s)
    assert 1 < cycles[256] / cycles[128] < 2
    assert len(list(tmp_path.glob("kernel-v6e-*.json"))) == 2


def test_a_program_is_scheduled_the_same_without_its_kernels_bodies(mesh, v6e_4, tmp_path):
    """Kernels with the same blocks and other bodies stay two. A longer grid has the same price; other blocks don't."""

    def call(kernel, x, rows):
        block = pl.BlockSpec((rows, 512), lambda i: (i, 0))
        grid = (len(x) // rows,)
        return pl.pallas_call(kernel, x, name=kernel.__name__, grid=grid, in_specs=[block], out_specs=block)(x)

    def add(x_ref, out_ref):
        out_ref[...] = x_ref[...] + 1

    def power(x_ref, out_ref):
        out_ref[...] = jnp.exp(x_ref[...]) * jnp.tanh(x_ref[...])

    def function(short, long):
        return call(add, short, 128), call(power, short, 128), call(add, long, 128), call(add, long, 256)

    device_mesh = Mesh(mesh.devices[:1], ("tp",))
    program = Program(function, device_mesh, exact=False)
    whole = NamedSharding(device_mesh, P())
    arguments = [jax.ShapeDtypeStruct((rows, 512), jnp.float32, sharding=whole) for rows in (1024, 4096)]
    built = program.compile(*arguments)
    lowered = program.lower(*arguments)
    bodies = take_bodies(lowered)
    emptied = program.compile_lowered(lowered, *arguments)
    assert emptied.memory_analysis().generated_code_size_in_bytes < built.memory_analysis().generated_code_size_in_bytes

    schedules = [parse(text) for text in (built.as_text(), put_bodies(emptied.as_text(), bodies))]
    rows = [
        [(i.opcode, i.shapes, i.estimated_cycles) for c in schedule.computations.values() for i in c.instructions]
        for schedule in schedules
    ]
    assert rows[0] == rows[1]
    calls, again = (list_kernel_calls(schedule) for schedule in schedules)
    assert [call.config for call in calls] == [call.config for call in again] and len(bodies) == 4
    digests = {(call.name.partition(".")[0], call.grid, call.blocks[0][0]): call.digest for call in calls}
    assert digests["add", (8,), 128] == digests["add", (32,), 128] and len(set(digests.values())) == 3
    prices = KernelPrices(tmp_path, v6e_4.hardware, 1, count_alone)
    prices.count(calls)
    assert len(list(tmp_path.glob("kernel-v6e-*.json"))) == 3


def test_blocks_that_need_too_much_vmem_are_refused_without_the_body(mesh):
    def add(x_ref, out_ref):
        out_ref[...] = x_ref[...] + 1

    device_mesh = Mesh(mesh.devices[:1], ("tp",))
    program = Program(lambda x: pl.pallas_call(add, x)(x), device_mesh, exact=False)
    large = jax.ShapeDtypeStruct((65536, 512), jnp.float32, sharding=NamedSharding(device_mesh, P()))
    lowered = program.lower(large)
    take_bodies(lowered)
    with pytest.raises(DoesNotFit, match=r"256\.00M of 127\.94M vmem"):
        program.compile_lowered(lowered, large)


@pytest.mark.long
def test_products_that_wait_for_the_matrix_units_take_what_surrounds_them_too(tmp_path):
    """v7x's compiler schedules them faster than its peak; v6e's, of as many matrix units, counts on their rate."""
    x, weight, bias = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2368, 1024), (1280, 1024), (1280,)))
    of_peak = {}
    for name in ("v6e-4", "v7x-4"):
        where = describe_slice(SliceSpec(name))
        device_mesh = Mesh(np.array(where.devices()[:1]), ("tp",))
        whole = NamedSharding(device_mesh, P())
        arguments = [jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=whole) for of in (x, weight, bias)]
        text = Program(linear, device_mesh, exact=False).compile(*arguments).as_text()
        prices = KernelPrices(tmp_path, where.hardware, where.cores, count_alone)
        cost = analyse(text, where.hardware, interconnect_of(where, device_mesh), kernel_cycles=prices)
        [kernel] = [item.kernel for item in cost.items if item.kernel is not None]
        cycles = prices(kernel)
        of_peak[name] = cycles / (2368 * 1280 * 1024 / (4 * 256 * 256))
        scheduled = prices.bundles(kernel).products / kernel.macs * (4 * 256 * 256)
        assert (scheduled < 1) == (name == "v7x-4")
    assert 1.05 < of_peak["v7x-4"] == pytest.approx(of_peak["v6e-4"], rel=0.1)


def test_what_does_not_fit_is_refused_and_by_how_much():
    where = describe_slice(SliceSpec("v6e-1"))
    device_mesh = Mesh(np.array(where.devices()), ("tp",))
    # The program needs it, and its double.
    large = jax.ShapeDtypeStruct((5, 1024, 1024, 1024), jnp.float32, sharding=NamedSharding(device_mesh, P()))
    with pytest.raises(DoesNotFit, match=r"\[5, 1024, 1024, 1024\].* 40\.. GiB.* 31\.2") as caught:
        Program(lambda x: x * 2, device_mesh, exact=False, name="double").compile(large)
    compiled = describe_refusal(caught.value, seconds=(1.0, 1.0), weights=GIB)
    assert 40 * GIB <= compiled.total_bytes < 41 * GIB
    assert 8 * GIB <= compiled.over_bytes < 10 * GIB


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "precision", "attention"),
    [
        ("v5p-8", "int8-attention", "optimistic_int8"),
        ("v7x-1", "float8-attention", "optimistic_float8_e4m3fn"),
        ("v7x-1", "float8-attention-both", "online_float8_e4m3fn_both"),
    ],
)
def test_a_step_in_8_bits_is_kernels_on_half_the_weights(kind, precision, attention):
    """Of the 1.3B model, with so many tokens that attention takes its keys in several chunks."""
    model = published_model("wan2.1-t2v-1.3b")
    mesh = make_mesh(None, heads=model.spec.heads, devices=describe_slice(SliceSpec(kind)).devices())
    request = GenerationRequest(height=256, width=256, frames=17).resolve(model.spec.defaults)
    program, arguments, _ = stage_programs(AbstractRuntime(model, mesh, precision), request)["denoise step"]
    plain = abstract_component(model.components["denoise"], "bfloat16", mesh).params
    eight, sixteen = (sum(x.size * x.dtype.itemsize for x in params.values()) for params in (arguments[0], plain))
    assert eight < 0.6 * sixteen
    text = program.compile(*arguments).as_text()
    for kernel in ("linear_8_bits_gelu_tanh", "linear_8_bits_residual", "layer_norm_rounded", "round_rows"):
        assert kernel in text
    for kernel in ("key_range", "round_keys", "round_queries", f"flash_attention_{attention}"):
        assert kernel in text
    # It is never repeated with both products, and attention to the text stays in bfloat16.
    repeats = re.findall(r"flash_attention_online_\w+?8\w*", text)
    assert bool(repeats) and {"both" in name for name in repeats} == {precision.endswith("both")}
    assert '"linear_residual' not in text


@pytest.mark.thorough
@pytest.mark.parametrize("continues", [False, True])
def test_a_guided_step_of_video_and_sound_compiles_for_one_chip(continues):
    """Three of four evaluations' rows of the sound are no multiple of eight; known ones have another timestep."""
    model = published_model("ltx-2.3")
    mesh = make_mesh(None, heads=model.spec.heads, devices=describe_slice(SliceSpec("v7x-1")).devices())
    request = GenerationRequest(prompt="a cat", height=256, width=256, frames=121)
    [segment] = model.spec.typical_references(request)
    resolved = model.spec.plan(segment if continues else request).request
    program, arguments, _ = stage_programs(AbstractRuntime(model, mesh, "bfloat16"), resolved)["denoise step"]
    assert "linear_residual" in program.compile(*arguments).as_text()


@pytest.mark.parametrize(
    ("kind", "precision", "able"),
    [
        ("v6e-4", "float8", "float32, bfloat16, int8, int8-attention, int8-attention-both"),
        ("v7x-4", "int8-attention", "float32, bfloat16, float8, float8-attention, float8-attention-both"),
    ],
)
def test_a_chip_refuses_8_bits_that_it_does_not_multiply(kind, precision, able):
    model = published_model("wan2.1-t2v-1.3b")
    mesh = make_mesh(None, heads=model.spec.heads, devices=describe_slice(SliceSpec(kind)).devices())
    with pytest.raises(InvalidInput, match=f"^TPU.*{precision}.*{able}$"):
        AbstractRuntime(model, mesh, precision).component("denoise")
    assert AbstractRuntime(model, mesh, precision).component("text_encoder").params  # which has no 8 bits
