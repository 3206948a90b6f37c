"""Plans of published models at their own sizes on common slices, shipped as data: to read one takes no compiler.

`scripts/price_models.py` writes them.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from wan_tpu.aot import key
from wan_tpu.aot.topology import DescribedSlice
from wan_tpu.data import write_whole
from wan_tpu.pricing.plan import SlicePlan, StagePlan
from wan_tpu.pricing.playback import Playback
from wan_tpu.pricing.question import Question, locate_plans
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.mesh import MeshShape
from wan_tpu.versions import installed_version

_DIGITS = 5
_STAGES = TypeAdapter(tuple[StagePlan, ...])
_PLAYBACKS = TypeAdapter(dict[str, Playback])


@dataclass(frozen=True)
class ShippedPlan:
    """A line of a file."""

    question: Question
    # The date, the versions of what compiled it, and "kernels", a digest of our kernels' sources. Some have no digest.
    made: Mapping[str, str]
    fields: Mapping[str, Any]  # The plan's fields besides model, slice, request and `made`, as JSON values.

    def is_for(self, mesh: Sequence[int | None]) -> bool:
        """Return whether it is for a mesh (None: any size of that axis)."""
        return all(wanted in (None, size) for wanted, size in zip(mesh, self.fields["mesh"], strict=True))

    @property
    def has_these_kernels(self) -> bool:
        """Whether it was made with the kernels that are installed."""
        return self.made.get("kernels") == _digest_kernels()

    def answer(self, model: str, described: DescribedSlice, request: ResolvedRequest) -> SlicePlan:
        """Return the plan for a request that asks its question."""
        fields = dict(self.fields) | {
            "mesh": MeshShape(*self.fields["mesh"]),
            "stages": _STAGES.validate_python(self.fields["stages"]),
            "playbacks": _PLAYBACKS.validate_python(self.fields["playbacks"]),
        }
        return SlicePlan(model=model, slice=described, request=request, made=self.made, **fields)


def find(model: str, question: Question, mesh: Sequence[int | None]) -> ShippedPlan | None:
    """Return the shipped plan that answers a question on a mesh (None: any size of that axis), if there is one."""
    return next((plan for plan in read(model) if plan.question == question and plan.is_for(mesh)), None)


def read(model: str) -> Iterator[ShippedPlan]:
    """Yield a model's shipped plans."""
    file = locate_plans(model)
    for line in file.read_text().splitlines() if file.exists() else ():
        values = json.loads(line)
        yield ShippedPlan(Question(**values["question"]), values["made"], values["fields"])


def add(plan: SlicePlan, dtype: str, date: str) -> None:
    """Write a plan to its model's file, instead of one that answers the same question; raises `OutputError`."""
    question = Question.of(plan.slice.name, dtype, plan.request)
    versions = {name: installed_version(name) for name in ("jax", "libtpu")}
    fields = dataclasses.asdict(plan)
    for name in ("model", "slice", "request", "made"):
        del fields[name]
    new = ShippedPlan(question, {"date": date, **versions, "kernels": _digest_kernels()}, _round(fields))
    plans = [shipped for shipped in read(plan.model) if shipped.question != question] + [new]
    lines = [json.dumps(dataclasses.asdict(shipped), separators=(",", ":")) for shipped in plans]
    file = locate_plans(plan.model)
    file.parent.mkdir(exist_ok=True)
    write_whole(file, "".join(f"{line}\n" for line in sorted(lines)).encode())


def _digest_kernels() -> str:
    return key.source_digest(("wan_tpu_kernels",))


def _round(value: Any) -> Any:
    """Return a JSON value whose fractions have `_DIGITS` digits."""
    if isinstance(value, Mapping):
        return {name: _round(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_round(item) for item in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
