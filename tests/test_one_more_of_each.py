"""One more TPU generation, kernel and field of a request, declared where docs/ say, are known everywhere else.

What a generation brings to commands is in tests/actors/test_new_generation.py, and a field's way from the command line
to the worker in tests/test_one_more_field.py.
"""

import ast
import dataclasses
import json

import jax.numpy as jnp
import pytest

from actors.planning.slice_description import describe_slice
from cluster.chips import CHIPS, Chip, load
from cluster.slice_spec import SliceSpec
from tests.actors.test_new_generation import INVENTED
from tests.conftest import ROOT
from tests.wan_tpu.test_aot_kernel_cost import kernel_config
from wan_tpu import GenerationRequest
from wan_tpu.aot.names import STEP
from wan_tpu.families import published_spec
from wan_tpu.ops import self_check
from wan_tpu.pricing.analyse import analyse
from wan_tpu.pricing.ici import Interconnect
from wan_tpu.pricing.planner import SlicePlanner
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.mesh import make_mesh
from wan_tpu.switches import KERNELS as KERNELS_VARIABLE
from wan_tpu_kernels.catalogue import KERNELS, MATMUL, Kernel, find_kind

MODEL = "wan2.1-t2v-1.3b"
PROGRAM = """
ENTRY %main (x: f32[16,384]) -> f32[16,384] {
  %x = f32[16,384]{1,0} parameter(0)
  ROOT %NAME.1 = f32[16,384]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config=CONFIG
}
"""


@pytest.fixture
def generation(tmp_path, monkeypatch):
    file = tmp_path / "v99.yaml"
    file.write_text(INVENTED)
    monkeypatch.setitem(CHIPS, "v99", load(file, Chip))
    return describe_slice(SliceSpec("v99-8"))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setenv(KERNELS_VARIABLE, "own")
    monkeypatch.setitem(KERNELS, "doubling", Kernel(jnp.add, jnp.add, {"double": MATMUL}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharperRequest(ResolvedRequest):
    """A request with one more field, which widens the latents."""

    sharpness: int = 1


def price(name: str, described):
    text = PROGRAM.replace("NAME", name).replace("CONFIG", kernel_config())
    links = Interconnect(((0, 0, 0, 0),), described.link_bytes_per_s, described.core_bytes_per_s)
    return analyse(text, described.hardware, links, kernel_cycles=lambda call: 4e9)


def test_kernel_is_priced_as_what_it_says_it_is_on_the_generation(generation, kernel):
    cost = price("double_twice", generation)
    assert cost.by_category()[MATMUL].estimate == pytest.approx(4e9 / CHIPS["v99"].clock_hz)
    assert not cost.unpriced
    undeclared = price("triple", generation)
    assert undeclared.by_category()[MATMUL].estimate == 0
    assert [name for name in undeclared.unpriced if "triple" in name]


@pytest.mark.thorough
def test_field_that_changes_a_program_is_priced(generation, tmp_path, monkeypatch):
    spec = published_spec(MODEL)
    shape = type(spec).latent_shape
    monkeypatch.setattr(
        type(spec), "latent_shape", lambda self, request: (*shape(self, request)[:4], 8 * request.sharpness)
    )
    usual = GenerationRequest(height=64, width=64, frames=5).resolve(spec.defaults)
    fields = {field.name: getattr(usual, field.name) for field in dataclasses.fields(usual)}
    jobs = {}
    for sharpness in (1, 2):
        request = SharperRequest(**fields, sharpness=sharpness)
        planner = SlicePlanner(MODEL, request, generation, dtype="bfloat16", cache=tmp_path, report=print)
        jobs[sharpness] = {name: job for name, (job, _) in planner.jobs(make_mesh((1, 1, 1), heads=spec.heads)).items()}
        for job in jobs[sharpness].values():
            assert SharperRequest(**json.loads(json.dumps(job.request))).sharpness == sharpness
    assert jobs[1][STEP].digest != jobs[2][STEP].digest
    assert jobs[1]["text_encoder"].digest == jobs[2]["text_encoder"].digest


def test_every_kernel_says_what_it_is_and_is_checked_on_chips():
    names = []
    for file in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "pallas_call":
                name = next(keyword.value for keyword in node.keywords if keyword.arg == "name")
                texts = [part.value for part in ast.walk(name) if isinstance(part, ast.Constant)]
                names += [text for text in texts if isinstance(text, str) and text[:1].isalpha()]
    assert len(names) >= len(KERNELS)
    assert not [name for name in names if find_kind(name.strip("_")) is None]
    assert find_kind("linear.15.x_ref") == MATMUL
    assert {case.kernel for case in self_check._cases(1)} == set(KERNELS)
