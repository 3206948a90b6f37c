"""Plan a model on a slice: compile and price its programs on a mesh."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh
from PIL import Image

from wan_tpu.aot import key
from wan_tpu.aot.names import ADAPTERS, DENOISE_PROGRAMS, KEYS, UNGUIDED_KEYS
from wan_tpu.aot.programs import AbstractRuntime, name_steps, stage_programs
from wan_tpu.aot.topology import DescribedSlice
from wan_tpu.errors import InvalidRequest, MeshError
from wan_tpu.families.model import published_model
from wan_tpu.pricing.analyse import analyse
from wan_tpu.pricing.bundles import CompileError
from wan_tpu.pricing.chunk_times import predict_playback
from wan_tpu.pricing.compiling import Compilers, Job, is_known
from wan_tpu.pricing.cost import Cost
from wan_tpu.pricing.hlo import parse
from wan_tpu.pricing.host import host_seconds
from wan_tpu.pricing.ici import interconnect_of
from wan_tpu.pricing.kernel_calls import list_kernel_calls
from wan_tpu.pricing.kernel_prices import CountBundles, KernelPrices, count_alone
from wan_tpu.pricing.plan import Prediction, ProgramPlan, SlicePlan, StagePlan, find_owner
from wan_tpu.pricing.playback import Playback
from wan_tpu.request import IMAGES, ResolvedRequest
from wan_tpu.runtime.mesh import MeshShape, make_mesh
from wan_tpu.stages import sound_decoders
from wan_tpu.suggest import did_you_mean
from wan_tpu_kernels.catalogue import find_kind

Report = Callable[[str], object]


class SlicePlanner:
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
        prompt_tokens: int | None = None,
        decoder: str | None = None,
    ) -> None:
        """Prepare to plan for one request on one slice.

        Args:
            cache: The folder that keeps compiled programs and counted kernels.
            report: Called with a line for each program that is compiled or priced.
            count: Counts a kernel's bundles.
            images: How many images the request has; the usual number if None.
            prompt_tokens: How long its prompt is, if programs depend on that; short if None.
            decoder: As for `published_spec`.

        Raises:
            InvalidRequest: The model can't generate that size, takes another number of images, or reads no prompt that
                is so long.
        """
        self._name = model
        self._model, self._decoder = published_model(model, decoder), decoder
        self._model.spec.check_size(request)
        counts = self._model.spec.images_of(request)
        if images not in (None, *counts):
            raise InvalidRequest(f"images is {images}; {model} takes {' or '.join(map(str, sorted(counts)))}", "images")
        self._images = images
        self._text_rows = None if prompt_tokens is None else self._model.spec.fit_text_rows(prompt_tokens)
        if self._text_rows is not None:
            self._model = self._model.for_text(self._text_rows)
        self._request = request
        self._slice = described
        self._dtype = dtype
        self._cache = cache
        self._report = report
        self._prices = KernelPrices(cache, described.hardware, described.cores, count)

    def plan(
        self, mesh: Sequence[int | None], only: str | None = None, stages: Sequence[str] | None = None
    ) -> SlicePlan:
        """Return the plan on a mesh; arguments and errors are those of `make_plans`."""
        with contextlib.closing(Compilers(self._cache)) as compilers:
            [plan] = make_plans([self.task(mesh, only, stages)], compilers)
        return plan

    def task(self, mesh: Sequence[int | None], only: str | None = None, stages: Sequence[str] | None = None) -> "Task":
        return Task(self, mesh, only, stages)

    def start(
        self, task: "Task", compilers: Compilers, pool: ThreadPoolExecutor
    ) -> tuple[Mesh, dict[str, "Future[ProgramPlan]"]]:
        """Begin to compile and price the programs of a task of this planner; return its mesh and them, by name."""
        placed = self.mesh(task.mesh)
        jobs = self.jobs(placed, task.stages, task.only)
        # Steps take longest, so they begin first. Most of the work is done by child processes.
        order = sorted(jobs, key=lambda name: name not in DENOISE_PROGRAMS)
        started = {
            name: pool.submit(self._program, compilers, *jobs[name], placed, f"program {i} of {len(jobs)}")
            for i, name in enumerate(order, 1)
        }
        return placed, {name: started[name] for name in jobs}

    def finish(self, placed: Mesh, programs: Sequence[ProgramPlan]) -> SlicePlan:
        """Return the plan that programs on a mesh make."""
        stage_plans = tuple(self._stages(programs))
        spec = self._model.spec
        experts = {*spec.denoise_stages, *(expert.stage for expert in spec.experts(self._request))}
        weights = {(self._model.same_weights.get(name, name), self._request.adapters_for(name)) for name in experts}
        return SlicePlan(
            model=self._name,
            slice=self._slice,
            mesh=MeshShape(**placed.shape),
            request=self._request,
            tokens=spec.tokens(spec.latent_shape(self._request)),
            stages=stage_plans,
            same_weights=self._model.same_weights,
            experts=len(weights),
            images=self._images,
            text_rows=self._text_rows,
            playbacks=self._predict_playbacks(stage_plans),
        )

    def mesh(self, mesh: Sequence[int | None]) -> Mesh:
        """Return a mesh over all devices of the slice, with defaults for axes that are None; raises `MeshError`."""
        devices = self._slice.devices()
        placed = make_mesh(mesh, heads=self._model.spec.heads, devices=devices)
        if placed.size < len(devices):
            raise MeshError(
                f"mesh {tuple(placed.shape.values())} uses {placed.size} of the {len(devices)} devices of "
                f"{self._slice.name}; give axes whose product is {len(devices)}, or a smaller slice"
            )
        return placed

    def meshes(self) -> Iterator[MeshShape]:
        """Yield every mesh over all devices of the slice that the model and the request can be divided over."""
        devices = self._slice.devices()
        for dp in (1, 2) if self._model.spec.is_guided(self._request) else (1,):
            for tp in (n for n in range(1, len(devices) + 1) if len(devices) % (dp * n) == 0):
                if self._model.spec.heads % tp == 0:
                    yield MeshShape(dp, len(devices) // (dp * tp), tp)

    def jobs(
        self, mesh: Mesh, stages: Sequence[str] | None = None, only: str | None = None
    ) -> dict[str, tuple[Job, int]]:
        """Return the job that compiles each program, and how often the program runs for a video, by its name.

        Args:
            stages: Those whose programs are returned; all if None.
            only: The one program that is returned; all if None. Raises `InvalidRequest` if there is none.
        """
        runtime = AbstractRuntime(self._model, mesh, self._dtype)
        traced_with = key.settings(self._model.config, self._dtype)
        fields = self._request.without_files().to_json()
        jobs: dict[str, tuple[Job, int]] = {}
        for group in self._group_stages(stages):
            for name, (_, arguments, calls) in stage_programs(
                runtime, self._request, group, images=self._images
            ).items():
                job = Job(
                    model=self._name,
                    program=name,
                    slice=self._slice,
                    mesh=MeshShape(**mesh.shape),
                    request=fields,
                    dtype=self._dtype,
                    depends_on=key.describe_program(name, arguments, mesh, traced_with),
                    stages=group,
                    images=self._images,
                    text_rows=self._text_rows,
                    decoder=self._decoder,
                )
                jobs[name] = job, calls
            if only in jobs:
                return {only: jobs[only]}
        if only is not None:
            hint = did_you_mean(only, jobs)
            raise InvalidRequest(f"there is no program {only!r}{hint}; this model has {', '.join(map(repr, jobs))}")
        return jobs

    def _group_stages(self, stages: Sequence[str] | None) -> list[tuple[str, ...]]:
        """Return the stages in groups that share no program; first the experts, whose tracing takes a sixtieth."""
        first, *experts, last = self._model.spec.components
        groups = [tuple(s for s in group if stages is None or s in stages) for group in (experts, [first], [last])]
        return [group for group in groups if group]

    def _program(self, compilers: Compilers, job: Job, calls: int, mesh: Mesh, place: str) -> ProgramPlan:
        name, shape = job.program, tuple(mesh.shape.values())
        doing = "compiled before:" if is_known(job, self._cache) else "compiling"
        self._report(f"{self._slice.name}, mesh {shape}, {place}: {doing} {name}")
        compiled, hlo = compilers.compile(job)
        if compiled.refused:
            return ProgramPlan(name, calls, compiled, None, None)
        self._report(f"{self._slice.name}, mesh {shape}, {place}: pricing {name}")
        try:
            optimistic, online = self._price(hlo, mesh)
        except CompileError as error:
            refused = dataclasses.replace(
                compiled, refused=f"the compiler refuses a kernel: {str(error).splitlines()[0]}"
            )
            return ProgramPlan(name, calls, refused, None, None)
        return ProgramPlan(name, calls, compiled, optimistic, online)

    def _price(self, hlo: str, mesh: Mesh) -> tuple[Prediction, Prediction]:
        """Return what a program takes with all heads on the optimistic path, and online; raises `CompileError`."""
        # Programs are compiled without their kernels' bodies. Those of XLA's own kernels came later, and are compiled.
        self._prices.count(call for call in list_kernel_calls(parse(hlo)) if find_kind(call.name))
        links = interconnect_of(self._slice, mesh)
        costs: list[Cost] = [
            analyse(hlo, self._slice.hardware, links, kernel_cycles=self._prices, prefer=(path,))
            for path in ("optimistic", "online")
        ]
        optimistic, online = (Prediction(cost.total, cost.by_category(), cost.unpriced) for cost in costs)
        return optimistic, online

    def _predict_playbacks(self, stages: Sequence[StagePlan]) -> dict[str, Playback]:
        """Return how a video in chunks plays, by where they are decoded; empty if some program has no price."""
        spec = self._model.spec
        if spec.chunk_frames is None:
            return {}
        steps = name_steps(self._model, self._request, spec.experts(self._request))
        places = {"on the same slice": False, f"on another {self._slice.name}": True}
        playbacks = {
            place: predict_playback(spec, self._request, stages, steps, decodes_beside=beside)
            for place, beside in places.items()
        }
        return {place: playback for place, playback in playbacks.items() if playback is not None}

    def _stages(self, programs: Sequence[ProgramPlan]) -> Iterator[StagePlan]:
        flops, spec = self._model.flops, self._model.spec
        images = spec.images_of(self._request)[0] if self._images is None else self._images
        denoise = [
            program
            for program in programs
            if program.name in (KEYS, UNGUIDED_KEYS, *DENOISE_PROGRAMS) or program.name.startswith(ADAPTERS)
        ]
        decoders = ("decoder", *sound_decoders(self._model))
        decoder = [program for program in programs if find_owner(program) in decoders]
        encoder = [program for program in programs if program not in denoise + decoder]
        host_s = host_seconds(self._model.spec, self._request, self._images)
        if encoder:
            # Only the number of images matters here, not their content.
            pictures: dict[str, Any] = dict.fromkeys(IMAGES[:images], Image.new("RGB", (1, 1)))
            prompts = len(spec.prompts(self._request))
            operations = flops.encoder(dataclasses.replace(self._request, **pictures), prompts=prompts)
            yield StagePlan("encoder", tuple(encoder), operations, host_s["encoder"])
        if denoise:
            names = name_steps(self._model, self._request, spec.experts(self._request))
            experts = {name: expert for expert, name in names.items()}
            operations = sum(
                program.calls * self._model.count_step(self._request, experts[program.name], images=images)
                for program in denoise
                if program.name in experts
            )
            yield StagePlan("denoise", tuple(denoise), operations, host_s["denoise"])
        if decoder:
            operations = flops.decoder(self._model.spec.decoded_shape(self._request))
            yield StagePlan("decoder", tuple(decoder), operations, host_s["decoder"])


class Task(NamedTuple):
    """A plan to make."""

    planner: SlicePlanner
    mesh: Sequence[int | None]  # None: the default of that axis.
    only: str | None = None  # The one program to plan; all if None.
    stages: Sequence[str] | None = None  # Those to plan; all if None.


def make_plans(tasks: Sequence[Task], compilers: Compilers) -> list[SlicePlan]:
    """Return the plan of each task; the programs of all are compiled by the same processes, which an error ends.

    Raises:
        MeshError: A mesh doesn't fit its slice or model.
        InvalidRequest: No program is called `only`.
        Unavailable: A process that compiles was killed.
    """
    with ThreadPoolExecutor(compilers.count) as pool:
        try:
            started = [task.planner.start(task, compilers, pool) for task in tasks]
            for program in as_completed([program for _, programs in started for program in programs.values()]):
                program.result()
        except BaseException:
            # Otherwise leaving the block would wait for all that is yet to be compiled.
            pool.shutdown(wait=False, cancel_futures=True)
            compilers.close()
            raise
    return [
        task.planner.finish(placed, [program.result() for program in programs.values()])
        for task, (placed, programs) in zip(tasks, started, strict=True)
    ]
