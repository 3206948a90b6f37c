"""Plan a model on a slice: what fits, what each stage is predicted to take, and on which mesh."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from wan_tpu.aot.programs import ADAPTERS, ENLARGE, FIRST_STEP, SKIPPED, STEP, AbstractRuntime, stage_programs
from wan_tpu.aot.topology import DescribedSlice
from wan_tpu.errors import InvalidRequest, MeshError
from wan_tpu.families.model import published_model
from wan_tpu.plan import VIDEO, Expert
from wan_tpu.pricing.analyse import analyse
from wan_tpu.pricing.compiling import Compiled, Job, compile_job, is_known
from wan_tpu.pricing.cost import Cost, Times
from wan_tpu.pricing.host import host_seconds
from wan_tpu.pricing.ici import interconnect_of
from wan_tpu.pricing.kernel_prices import CountBundles, KernelPrices, count_alone
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.memory import GIB, MemoryNeed, needed_bytes
from wan_tpu.runtime.mesh import MeshShape, make_mesh
from wan_tpu.stages import sound_decoders

Report = Callable[[str], object]
KEYS = "text keys"


@dataclass(frozen=True)
class Prediction:
    """Seconds of one call; `paths` says which branch attention takes: every head optimistic, or every head online."""

    total: Times
    by_category: dict[str, Times]
    unpriced: tuple[str, ...]


@dataclass(frozen=True)
class ProgramPlan:
    """One program: how often it runs for a video, what it needs, what it takes (None when it can't be compiled)."""

    name: str
    calls: int
    compiled: Compiled
    optimistic: Prediction | None
    online: Prediction | None


@dataclass(frozen=True)
class StagePlan:
    """The programs of one stage together.

    Attributes:
        name: The stage.
        programs: Its programs.
        flops: The operations of the whole stage for one video, on all devices.
        host_s: The seconds for one video in which the devices wait for the host.
    """

    name: str
    programs: tuple[ProgramPlan, ...]
    flops: int
    host_s: float = 0.0

    @property
    def seconds(self) -> Times | None:
        """Seconds a video of the devices, heads optimistic; None when a program can't be compiled."""
        total = Times(0.0, 0.0)
        for program in self.programs:
            if program.optimistic is None:
                return None
            total += program.optimistic.total * program.calls
        return total


class Needs(NamedTuple):
    """What a video takes of a slice in one stage.

    Attributes:
        seconds: Seconds of the slice.
        resident_bytes: What stays on a device: weights and programs, by name. Stages on one slice share those that have
            the same name.
        working_bytes: What a device needs besides while the stage runs.
    """

    seconds: float
    resident_bytes: dict[str, int]
    working_bytes: int


def add_memory(needs: Iterable[Needs]) -> list[MemoryNeed]:
    """Return what stages need on one slice; weights and programs that they share are counted once."""
    needs = list(needs)
    shared = {name: count for need in needs for name, count in need.resident_bytes.items()}
    return [MemoryNeed(sum(shared.values())), *(MemoryNeed(0, need.working_bytes) for need in needs)]


def _find_owner(program: ProgramPlan) -> str:
    """Return what a program shares its weights with."""
    owner = program.name.split(" first")[0].split(" later")[0]
    # These come before the step.
    return STEP if owner in (KEYS, SKIPPED, FIRST_STEP) or owner.startswith(ADAPTERS) else owner


def _runs(expert: Expert, program: ProgramPlan, has_sizes: bool) -> bool:
    """Return whether an expert runs a program; `has_sizes` says whether the experts' latents differ in size."""
    if program.name in (FIRST_STEP, ENLARGE):
        return expert.enlarges == (program.name == ENLARGE)
    return expert.enlarges or not has_sizes or program.name not in (STEP, SKIPPED)


def _count_steps(experts: Iterable[Expert]) -> int:
    return sum(expert.stop - expert.start for expert in experts)


@dataclass(frozen=True)
class Plan:
    """A model's stages on one slice and mesh.

    Attributes:
        model: The published model.
        slice: The slice.
        mesh: The mesh over its devices.
        request: What is generated.
        tokens: Tokens of the video's latents.
        stages: The stages.
        experts: How many of the denoising stages have weights of their own.
        same_weights: The stages that have another one's, by name.
        images: How many images the request has; the usual number if None.
    """

    model: str
    slice: DescribedSlice
    mesh: MeshShape
    request: ResolvedRequest
    tokens: int
    stages: tuple[StagePlan, ...]
    experts: int
    same_weights: Mapping[str, str] = field(default_factory=dict)
    images: int | None = None

    def needs(self, experts: Sequence[Expert]) -> dict[str, Needs]:
        """Return what each stage of the model takes, its experts one by one, those left out that can't be compiled.

        Args:
            experts: The experts of the request that the plan's stages run.
        """
        needs: dict[str, Needs] = {}
        for stage in self.stages:
            if stage.seconds is None:
                continue
            if stage.name != "denoise":
                needs[stage.name] = self._add_programs([(program, 1.0) for program in stage.programs], stage.host_s)
                continue
            has_sizes = any(program.name == FIRST_STEP for program in stage.programs)
            for expert in experts:
                # Each program's calls are shared by number of steps among the experts that run it.
                shares = [
                    (program, _count_steps([expert]) / _count_steps(e for e in experts if _runs(e, program, has_sizes)))
                    for program in stage.programs
                    if _runs(expert, program, has_sizes)
                ]
                host_s = stage.host_s * _count_steps([expert]) / _count_steps(experts)
                weights = self.same_weights.get(expert.stage, expert.stage)
                needs[expert.stage] = self._add_programs(shares, host_s, weights)
        return needs

    def _add_programs(
        self, shares: Sequence[tuple[ProgramPlan, float]], host_s: float, expert_weights: str = STEP
    ) -> Needs:
        """Return what programs take together.

        Args:
            shares: The programs, each with the share of its calls that counts.
            host_s: Seconds in which the devices wait for the host.
            expert_weights: The name of the weights that the steps use.
        """
        seconds, resident = host_s, dict[str, int]()
        for program, share in shares:
            assert program.optimistic is not None
            seconds += program.optimistic.total.estimate * program.calls * share
            owner, copies = _find_owner(program), 1
            if owner == STEP:
                owner, copies = expert_weights, self.copies
            resident[f"weights of {owner}"] = program.compiled.weights_bytes * copies
            resident[program.name] = program.compiled.code_bytes  # It stays, as weights do.
        return Needs(seconds, resident, max(program.compiled.other_bytes for program, _ in shares))

    @property
    def programs(self) -> list[ProgramPlan]:
        """All programs in order."""
        return [program for stage in self.stages for program in stage.programs]

    @property
    def copies(self) -> int:
        """How often an expert's weights are there: with adapters, its own and the changed ones."""
        return 1 + any(program.name.startswith(ADAPTERS) for program in self.programs)

    @property
    def parts(self) -> list[MemoryNeed]:
        """What all weights and programs need of a device that holds them together.

        The programs of a VAE half share their weights, so do a step and the text's keys; experts don't.
        """
        weights: dict[str, int] = {}
        for program in self.programs:
            owner = _find_owner(program)
            weights[owner] = program.compiled.weights_bytes * (self.experts * self.copies if owner == STEP else 1)
        programs = [MemoryNeed(program.compiled.code_bytes, program.compiled.other_bytes) for program in self.programs]
        return [*map(MemoryNeed, weights.values()), *programs]

    @property
    def resident_gib(self) -> float:
        """GiB a device with all weights and programs resident."""
        return needed_bytes(self.parts) / GIB

    @property
    def largest_gib(self) -> float:
        """GiB a device when weights are freed after their stage: the neediest program alone."""
        return max(program.compiled.total_bytes for program in self.programs) / GIB


class Planner:
    """Compiles and prices the programs of one published model and request on one slice."""

    def __init__(
        self,
        model: str,
        request: ResolvedRequest,
        described: DescribedSlice,
        *,
        dtype: str,
        cache: Path,
        report: Report,
        count: CountBundles = count_alone,
        images: int | None = None,
    ) -> None:
        """Prepare to plan for one request on one slice.

        Args:
            model: The published model.
            request: What is generated.
            described: The slice.
            dtype: The precision.
            cache: The folder that keeps compiled programs and counted kernels.
            report: Called with a line for each program that is compiled or priced.
            count: Counts a kernel's bundles.
            images: How many images the request has; the usual number if None.

        Raises:
            InvalidRequest: The model can't generate that size, or takes another number of images.
        """
        self._name = model
        self._model = published_model(model)
        self._model.spec.check_size(request)
        counts = self._model.spec.image_counts
        if images not in (None, *counts):
            raise InvalidRequest(f"images is {images}; {model} takes {' or '.join(map(str, sorted(counts)))}", "images")
        self._images = images
        self._request = request
        self._slice = described
        self._dtype = dtype
        self._cache = cache
        self._report = report
        self._prices = KernelPrices(cache, described.hardware, described.cores, count)

    def plan(self, mesh: Sequence[int | None], only: str | None = None, stages: Sequence[str] | None = None) -> Plan:
        """Return the plan on a mesh, axes that are None as by default; `only` keeps one program, `stages` some stages'.

        Raises `MeshError` when the mesh doesn't fit slice or model, `InvalidRequest` when no program is called `only`.
        """
        placed = self.mesh(mesh)
        tokens = self._model.spec.tokens(self._model.spec.latent_shape(self._request))
        runtime = AbstractRuntime(self._model, placed, self._dtype)
        programs_of = stage_programs(runtime, self._request, stages, images=self._images)
        calls = {name: calls for name, (_, _, calls) in programs_of.items()}
        if only is not None and only not in calls:
            raise InvalidRequest(f"no program is called {only!r}; this model's are {', '.join(map(repr, calls))}")
        programs = [self._program(name, n, placed) for name, n in calls.items() if only in (None, name)]
        return Plan(
            model=self._name,
            slice=self._slice,
            mesh=MeshShape(**placed.shape),
            request=self._request,
            tokens=tokens,
            stages=tuple(self._stages(programs)),
            same_weights=self._model.same_weights,
            experts=len({self._model.same_weights.get(stage, stage) for stage in self._model.spec.denoise_stages}),
            images=self._images,
        )

    def mesh(self, mesh: Sequence[int | None]) -> Mesh:
        """Return a mesh over all devices of the slice, axes that are None as by default; raises `MeshError`."""
        devices = self._slice.devices()
        placed = make_mesh(mesh, heads=self._model.spec.heads, devices=devices)
        if placed.size < len(devices):
            raise MeshError(
                f"mesh {tuple(placed.shape.values())} uses {placed.size} of the {len(devices)} devices of "
                f"{self._slice.name}; give axes whose product is {len(devices)}, or a smaller slice"
            )
        return placed

    def meshes(self) -> Iterator[MeshShape]:
        """Yield every mesh over all devices of the slice that model and request divide over."""
        devices = self._slice.devices()
        for dp in (1, 2) if self._model.spec.guided(self._request) else (1,):
            for tp in (n for n in range(1, len(devices) + 1) if len(devices) % (dp * n) == 0):
                if self._model.spec.heads % tp == 0:
                    yield MeshShape(dp, len(devices) // (dp * tp), tp)

    def job(self, program: str, mesh: MeshShape) -> Job:
        """Return what is compiled for a program; steps and guidance change the expert's programs only."""
        usual = self._model.spec.defaults
        sampled = self._request if program in (KEYS, FIRST_STEP, ENLARGE, STEP, SKIPPED) else usual
        settings: dict[str, Any] = {name: getattr(self._request, name) for name in ("height", "width", "frames")}
        settings |= {name: getattr(sampled, name) for name in ("steps", "guidance_scale")}
        if sampled.solver != usual.solver:
            settings["solver"] = sampled.solver
        if program in (STEP, SKIPPED) and self._request.cache is not None:
            settings["cache"] = self._request.cache
            schedule = {name: getattr(self._request, name) for name in ("shift", "solver", "sigmas", "switch_step")}
            settings |= {name: value for name, value in schedule.items() if value is not None}
        if program.startswith(ADAPTERS):
            settings["loras"] = [str(lora) for lora in self._request.loras]
        return Job(self._name, program, self._slice, mesh, settings, self._dtype, self._images)

    def _program(self, name: str, calls: int, mesh: Mesh) -> ProgramPlan:
        shape = MeshShape(**mesh.shape)
        job = self.job(name, shape)
        doing = "compiled before:" if is_known(job, self._cache) else "compiling"
        self._report(f"{self._slice.name}, mesh {tuple(shape)}: {doing} {name}")
        compiled, hlo = compile_job(job, self._cache)
        if compiled.refused:
            return ProgramPlan(name, calls, compiled, None, None)
        self._report(f"{self._slice.name}, mesh {tuple(shape)}: pricing {name}")
        optimistic, online = (self._price(hlo, mesh, path) for path in ("optimistic", "online"))
        return ProgramPlan(name, calls, compiled, optimistic, online)

    def _price(self, hlo: str, mesh: Mesh, path: str) -> Prediction:
        cost: Cost = analyse(
            hlo, self._slice.hardware, interconnect_of(self._slice, mesh), kernel_cycles=self._prices, prefer=(path,)
        )
        return Prediction(cost.total, cost.by_category(), cost.unpriced)

    def _stages(self, programs: list[ProgramPlan]) -> Iterator[StagePlan]:
        flops, spec = self._model.flops, self._model.spec
        branches = 2 if spec.guided(self._request) else 1
        denoise = [
            program
            for program in programs
            if program.name in (KEYS, FIRST_STEP, ENLARGE, STEP, SKIPPED) or program.name.startswith(ADAPTERS)
        ]
        decoders = ("decoder", *sound_decoders(self._model))
        decoder = [program for program in programs if _find_owner(program) in decoders]
        encoder = [program for program in programs if program not in denoise + decoder]
        host_s = host_seconds(self._model.spec, self._request, self._images)
        if encoder:
            operations = flops.encoder(self._request, prompts=branches)
            yield StagePlan("encoder", tuple(encoder), operations, host_s["encoder"])
        if denoise:
            last = spec.experts(self._request)[-1]
            steps = {FIRST_STEP: last.start, STEP: last.stop}
            operations = sum(
                program.calls
                * flops.step(spec.latent_shapes(self._request, steps[program.name])[VIDEO], branches=branches)
                for program in denoise
                if program.name in steps
            )
            yield StagePlan("denoise", tuple(denoise), operations, host_s["denoise"])
        if decoder:
            operations = flops.decoder(self._model.spec.decoded_shape(self._request))
            yield StagePlan("decoder", tuple(decoder), operations, host_s["decoder"])


def share_of_peak(stage: StagePlan, plan: Plan) -> float:
    """Return the share of the bfloat16 peak that a stage is predicted to reach, by the estimate."""
    seconds = stage.seconds
    devices = math.prod(plan.mesh)
    if seconds is None or seconds.estimate == 0:
        return 0.0
    return stage.flops / (seconds.estimate * devices * plan.slice.hardware.peak_flops)
