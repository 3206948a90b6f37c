"""A plan as `wan-tpu plan` makes it, of which nothing was compiled."""

from wan_tpu import GenerationRequest
from wan_tpu.aot.names import STEP
from wan_tpu.aot.topology import DescribedSlice, Hardware
from wan_tpu.families import published_spec
from wan_tpu.pricing.compiling import Compiled
from wan_tpu.pricing.cost import CATEGORIES, Times
from wan_tpu.pricing.plan import Prediction, ProgramPlan, SlicePlan, StagePlan
from wan_tpu.runtime.memory import GIB
from wan_tpu.runtime.mesh import MeshShape

MODEL = "wan2.1-t2v-1.3b"
SLICE = DescribedSlice(
    name="v6e-4",
    topology="v6e:2x2",
    host_bounds=(2, 2, 1),
    hardware=Hardware("v6e", "v6e:2x2", 1.75e9, 918e12, 32 * GIB, 1638e9),
    wraps=(0, 0, 0),
    link_bytes_per_s=100e9,
    core_bytes_per_s=0.0,
)


def prediction(attention: float) -> Prediction:
    parts = {name: Times(0.25, 0.125, 0.0625) for name in CATEGORIES} | {"convolution": Times(0.0, 0.0)}
    parts |= {"attention": Times(attention, attention, attention / 2)}
    return Prediction(sum(parts.values(), Times(0.0, 0.0)), parts, ())


def make_plan() -> SlicePlan:
    request = GenerationRequest(height=480, width=832, frames=81, steps=50).resolve(published_spec(MODEL).defaults)
    compiled = Compiled(30.0, 55.0, 2 * GIB, GIB // 2, code_bytes=GIB // 2)
    step = ProgramPlan(STEP, 50, compiled, prediction(1.0), prediction(1.5))
    refused = Compiled(60.0, 60.0, GIB, 40 * GIB, 10 * GIB, refused="needs 41.0 GiB on each device, which has 31.2")
    decoder = ProgramPlan("decoder later", 20, refused, None, None)
    stages = (StagePlan("denoise", (step,), int(1e17), host_s=0.5), StagePlan("decoder", (decoder,), int(1e15)))
    return SlicePlan(MODEL, SLICE, MeshShape(2, 1, 2), request, 32760, stages, experts=2)
