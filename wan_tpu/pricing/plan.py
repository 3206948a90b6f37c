"""A model's plan on a slice: whether it fits, and each stage's predicted time."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wan_tpu.aot.names import ADAPTERS, ENLARGE, FIRST_STEP, KEYS, SKIPPED, SMALLEST_STEP, STEP, UNGUIDED
from wan_tpu.aot.topology import DescribedSlice
from wan_tpu.plan import Expert
from wan_tpu.pricing.compiling import Compiled
from wan_tpu.pricing.cost import Times
from wan_tpu.pricing.playback import Playback
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.memory import GIB, MemoryNeed, needed_bytes
from wan_tpu.runtime.mesh import MeshShape


@dataclass(frozen=True)
class Prediction:
    """Seconds of one call, where every attention head takes the same branch: the optimistic or the online one."""

    total: Times
    by_category: dict[str, Times]
    unpriced: tuple[str, ...]


@dataclass(frozen=True)
class ProgramPlan:
    """One program: how often it runs per video, the memory it needs, and its time (None if it can't be compiled)."""

    name: str
    calls: int
    compiled: Compiled
    optimistic: Prediction | None
    online: Prediction | None


@dataclass(frozen=True)
class StagePlan:
    """The programs of one stage together."""

    name: str
    programs: tuple[ProgramPlan, ...]
    flops: int  # The operations of the whole stage for one video, on all devices.
    host_s: float = 0.0  # The seconds of one video during which the devices wait for the host.

    @property
    def seconds(self) -> Times | None:
        """Seconds of the devices for one video, with optimistic heads; None if a program can't be compiled."""
        total = Times(0.0, 0.0)
        for program in self.programs:
            if program.optimistic is None:
                return None
            total += program.optimistic.total * program.calls
        return total


class StageNeeds(NamedTuple):
    """The time and memory that a video needs on a slice in one stage."""

    seconds: float  # Seconds of the slice.
    # Memory in permanent use on a device: weights and programs, by name. Stages on one slice share those with the same
    # name.
    resident_bytes: dict[str, int]
    working_bytes: int  # Additional memory in use on a device while the stage runs.


def add_memory(needs: Iterable[StageNeeds]) -> list[MemoryNeed]:
    """Return the memory that stages need on one slice; weights and programs that they share count once."""
    needs = list(needs)
    shared = {name: count for need in needs for name, count in need.resident_bytes.items()}
    return [MemoryNeed(sum(shared.values())), *(MemoryNeed(0, need.working_bytes) for need in needs)]


def find_owner(program: ProgramPlan) -> str:
    """Return the name of the program whose weights a program shares."""
    owner = program.name.removesuffix(UNGUIDED).split(" first")[0].split(" later")[0]
    # These run before the step.
    return STEP if owner in (KEYS, SKIPPED, FIRST_STEP, SMALLEST_STEP) or owner.startswith(ADAPTERS) else owner


def _runs(expert: Expert, program: str, names: Collection[str]) -> bool:
    """Return whether an expert runs a program, one of `names`."""
    name = program.removesuffix(UNGUIDED)
    if name + UNGUIDED in names and expert.guided == (program != name):
        return False
    if name in (FIRST_STEP, ENLARGE):
        return expert.enlarges == (name == ENLARGE)
    return expert.enlarges or FIRST_STEP not in names or name not in (STEP, SKIPPED)


def _count_steps(experts: Iterable[Expert]) -> int:
    return sum(expert.stop - expert.start for expert in experts)


@dataclass(frozen=True)
class SlicePlan:
    """A model's stages on one slice and mesh."""

    model: str
    slice: DescribedSlice
    mesh: MeshShape
    request: ResolvedRequest
    tokens: int
    stages: tuple[StagePlan, ...]
    experts: int  # The number of denoising stages with weights of their own.
    # The stages that use another stage's weights, with that stage's name.
    same_weights: Mapping[str, str] = field(default_factory=dict)
    images: int | None = None  # How many images the request has; the usual number if None.
    # How long the texts are that its programs are for, where they depend on that; the shortest if None.
    text_rows: int | None = None
    # How a video that is made chunk by chunk plays, by where its chunks are decoded.
    playbacks: Mapping[str, Playback] = field(default_factory=dict)
    made: Mapping[str, str] | None = None  # Date and versions of a shipped plan; None if it was compiled here.

    def needs(self, experts: Sequence[Expert]) -> dict[str, StageNeeds]:
        """Return what each stage of the model needs, expert by expert, without those that can't be compiled.

        Args:
            experts: The experts of the request that the plan's stages run.
        """
        needs: dict[str, StageNeeds] = {}
        for stage in self.stages:
            if stage.seconds is None:
                continue
            if stage.name != "denoise":
                needs[stage.name] = self._add_programs([(program, 1.0) for program in stage.programs], stage.host_s)
                continue
            names = {program.name for program in stage.programs}
            for name in dict.fromkeys(expert.stage for expert in experts):
                # A stage may run several ranges of steps. Each program's calls are divided among the ranges that run
                # it, in proportion to their steps.
                stage_experts = [expert for expert in experts if expert.stage == name]
                shares = []
                for program in stage.programs:
                    running = [expert for expert in experts if _runs(expert, program.name, names)]
                    if steps := _count_steps(expert for expert in stage_experts if expert in running):
                        shares.append((program, steps / _count_steps(running)))
                host_s = stage.host_s * _count_steps(stage_experts) / _count_steps(experts)
                needs[name] = self._add_programs(shares, host_s, self.same_weights.get(name, name))
        return needs

    def _add_programs(
        self, shares: Sequence[tuple[ProgramPlan, float]], host_s: float, expert_weights: str = STEP
    ) -> StageNeeds:
        """Return what programs need together.

        Args:
            shares: The programs, each with the share of its calls that counts.
            host_s: Seconds in which the devices wait for the host.
            expert_weights: The name of the weights that the steps use.
        """
        seconds, resident = host_s, dict[str, int]()
        for program, share in shares:
            assert program.optimistic is not None
            seconds += program.optimistic.total.estimate * program.calls * share
            owner, copies = find_owner(program), 1
            if owner == STEP:
                owner, copies = expert_weights, self.copies
            resident[f"weights of {owner}"] = program.compiled.weights_bytes * copies
            resident[program.name] = program.compiled.code_bytes  # It stays on the device, as weights do.
        return StageNeeds(seconds, resident, max(program.compiled.other_bytes for program, _ in shares))

    @property
    def programs(self) -> list[ProgramPlan]:
        return [program for stage in self.stages for program in stage.programs]

    @property
    def copies(self) -> int:
        """The number of copies of an expert's weights: with adapters, the original and the merged ones."""
        return 1 + any(program.name.startswith(ADAPTERS) for program in self.programs)

    @property
    def parts(self) -> list[MemoryNeed]:
        """The memory of a device that holds all weights and programs.

        The programs of a VAE half share their weights, and so do a step and the text's keys; experts don't.
        """
        weights: dict[str, int] = {}
        for program in self.programs:
            owner = find_owner(program)
            weights[owner] = program.compiled.weights_bytes * (self.experts * self.copies if owner == STEP else 1)
        programs = [MemoryNeed(program.compiled.code_bytes, program.compiled.other_bytes) for program in self.programs]
        return [*map(MemoryNeed, weights.values()), *programs]

    @property
    def resident_gib(self) -> float:
        """GiB per device with all weights and programs resident."""
        return needed_bytes(self.parts) / GIB

    @property
    def largest_gib(self) -> float:
        """GiB per device if weights are freed after their stage: that of the largest program alone."""
        return max(program.compiled.total_bytes for program in self.programs) / GIB


def share_of_peak(stage: StagePlan, plan: SlicePlan) -> float:
    """Return the share of the bfloat16 peak that a stage is predicted to reach, by the estimate."""
    seconds = stage.seconds
    devices = math.prod(plan.mesh)
    if seconds is None or seconds.estimate == 0:
        return 0.0
    return stage.flops / (seconds.estimate * devices * plan.slice.hardware.peak_flops)
