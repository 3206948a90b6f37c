"""What runs on every host of a slice: the weights and programs of a pool's stages, driven a piece at a time.

Methods are of two kinds. In lockstep: every host runs them with the same arguments in the same order, because the
programs they call exchange data between hosts; they tell how many seconds they spent compiling. On the side: they only
copy between host and devices, so a second thread may run them while a step computes. A request that can't be run
(`InvalidRequest`), has no room (`DoesNotFit`) or gives NaN (`UnhealthyResult`) raises the same error on every host, and
the host goes on with the next.

A request has a key, the caller's name for it, under which its inputs and its state are held on the devices.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from actors.observe.meters import ChipMeters
from actors.slices.fetched_adapters import FetchedAdapters, check_same_everywhere
from actors.slices.messages import HostProgress, Report, ReportedProgress
from actors.slices.payloads import Payload, TextEmbedding, mp4, pack, unpack
from actors.slices.profiling import HostProfile, open_to_dashboard
from cluster.gang.protocol import Output, report
from wan_tpu import stages
from wan_tpu.aot.key import made_by
from wan_tpu.aot.programs import stage_programs
from wan_tpu.data import Conditioning, DenoiseState, ImageCondition
from wan_tpu.errors import DoesNotFit, InvalidInput, OutputError, WanTpuError
from wan_tpu.media.mp4 import Mp4
from wan_tpu.pipeline import open_runtime
from wan_tpu.plan import ENCODER, RequestPlan
from wan_tpu.request import GenerationRequest, ResolvedRequest
from wan_tpu.runtime.processes import same_everywhere
from wan_tpu.stage_machine import StageMachine, Step
from wan_tpu.stages.encode import crop_warnings
from wan_tpu.switches import OVERLAPPED, OWN, set_switches

COMPILE_S = 1800.0  # that a program may take to compile
_SIZES = 64  # Sizes of videos that are remembered to fit, the largest ones.


class OutOfOrder(WanTpuError):
    """A host was asked for what can't come next there: its driver's or leader's mistake, never a request's."""


@dataclasses.dataclass
class _Denoising:
    """A request on an expert: inputs on the devices, and the run once it has begun."""

    plan: RequestPlan
    inputs: dict[str, stages.ExpertInputs]  # by stage: an expert without guidance takes the prompt alone
    state: DenoiseState
    run: stages.ExpertRun | None = None


@dataclasses.dataclass(frozen=True)
class _Encoding:
    request: ResolvedRequest
    inputs: stages.ImageInputs


@dataclasses.dataclass(frozen=True)
class _Decoding:
    request: ResolvedRequest
    frames: list[jax.Array]


_Value = TypeVar("_Value", TextEmbedding, ImageCondition, DenoiseState)
_Work = TypeVar("_Work", _Encoding, _Denoising, _Decoding)
_PREPARED_BY = {_Encoding: "prepare_encode", _Denoising: "prepare_denoise", _Decoding: "prepare_decode"}


class StageHost(HostProfile):
    """One host of a slice that runs a pool's stages; on a slice of several, made after `jax.distributed` is joined."""

    def __init__(
        self,
        checkpoint: str,
        hosted: tuple[str, ...],
        mesh: tuple[int | None, int | None, int | None] | None = None,
        dtype: str = "bfloat16",
        executables: str | None = None,
        kernels: str = OWN,
        collectives: str = OVERLAPPED,
        report: Report = report,
    ) -> None:
        """Open a model on all devices of the slice; its weights are read by `load`.

        hosted  the pool's stages, of `ModelSpec.stages`
        mesh    (dp, sp, tp) over all devices of the slice; what is None takes its default
        kernels, collectives  `wan_tpu.switches`, of this whole process
        report  given a `HostProgress` now and then; by default it goes to the leader of the slice

        Raises `InvalidInput` (or the errors of `open_runtime`) for what doesn't fit the checkpoint or devices.
        """
        set_switches(kernels, collectives)
        self._report, self._progress = report, ReportedProgress(report)
        self._runtime = open_runtime(checkpoint, dtype, mesh, executables=executables, progress=self._progress)
        self._runtime.on_compile = self._compiling
        self._told = HostProgress("", 0, 1)
        self._spec, self._stages = self._runtime.model.spec, hosted
        known = self._spec.components
        unknown = [stage for stage in hosted if stage not in known]
        if unknown or not hosted:
            what = f"stages {', '.join(unknown) or '()'} of {checkpoint}"
            raise InvalidInput(f"{what} can't be hosted; this model has {', '.join(known)}")
        self._components = [name for stage in hosted for name in known[stage]]
        self._first = jax.process_index() == 0
        open_to_dashboard()
        if jax.default_backend() == "tpu":
            ChipMeters(hosted).start()
        self._work: dict[str, _Encoding | _Denoising | _Decoding] = {}
        self._fetched = FetchedAdapters()
        self._fitting: set[tuple[int, int, int]] = set()  # height, width, frames that have run or been compiled here

    def software(self) -> dict[str, str]:
        """Return what decides the numbers that this host computes: code, packages, flags."""
        return made_by()

    # ---- in lockstep

    def load(self) -> None:
        """Read the weights and tokenizers of all stages, after a look at every file's headers."""
        self._runtime.check(self._components)
        for name in self._components:
            self._runtime.component(name)
            self._runtime.prepare(name)

    def warm_up(self, request: GenerationRequest) -> None:
        """Compile every program that a request like this needs here.

        With an image, if the model takes one; it needn't be given.
        """
        image, last = "t2v" not in self._spec.tasks, self._spec.last_images == "required"
        plan = self._spec.plan(request, image=request.image is not None or image, last=last)
        found = [
            item
            for stage in self._stages
            if stage in plan.shapes
            for item in stage_programs(self._runtime, plan.request, (stage,)).items()
        ]
        with self._fits(plan.request):
            for i, (name, (program, args, _)) in enumerate(found, 1):
                self._told = HostProgress(name, i, len(found))
                self._report(self._told)
                program.compile(*args)

    def _compiling(self, program: str | None) -> None:
        """Tell the leader, which would take this for a call that hangs."""
        self._report(dataclasses.replace(self._told, within_s=COMPILE_S if program else None))

    def encode_text(self, prompt: str) -> Output:
        """Encode one prompt: ((compile_s, warnings), `TextEmbedding`).

        The embedding's bits depend on prompt, model, dtype and mesh alone.
        """
        self._check_stage(ENCODER)
        before, warnings = self._runtime.compile_s, list[str]()
        values = stages.encode_prompt(self._runtime, prompt, warnings.append)
        return self._output((self._runtime.compile_s - before, warnings), lambda: TextEmbedding(values))

    def encode_image(self, key: str) -> Output:
        """Encode the image that `prepare_encode` has put here: ((compile_s, warnings), `ImageCondition`)."""
        before, work = self._runtime.compile_s, self._take(key, _Encoding)
        bar = self._progress.bar(ENCODER, len(work.inputs.chunks) + (work.inputs.clip is not None))
        with self._fits(work.request):
            condition = stages.encode_image(self._runtime, work.request, work.inputs, bar)
        warnings = list(crop_warnings(self._runtime.model, work.request))
        return self._output((self._runtime.compile_s - before, warnings), lambda: condition)

    def begin(self, key: str) -> tuple[float]:
        """Make the text's keys for the expert that runs the next step: (compile_s,).

        Called once an expert: a pool that hosts both is called again at the boundary, and goes on from the state here.
        """
        before, work = self._runtime.compile_s, self._get(key, _Denoising)
        state = _state(work)
        operation = StageMachine(work.plan, step=state.step).next_on(self._stages)
        if not isinstance(operation, Step):
            raise OutOfOrder(f"request {key} has no step to run on {', '.join(self._stages)}: {operation} comes next")
        expert = operation.expert
        if loras := work.plan.request.loras_for(expert.stage):
            check_same_everywhere(loras)
        work.state, work.run = state, None  # the other expert's keys go first
        with self._fits(work.plan.request):
            work.run = stages.ExpertRun(self._runtime, work.plan, expert, work.inputs[expert.stage], state)
        return (self._runtime.compile_s - before,)

    def step(self, key: str) -> tuple[float, int]:
        """Run the next step of a request that has begun: (compile_s, how many are done)."""
        before, work = self._runtime.compile_s, self._get(key, _Denoising)
        run = work.run
        if run is None or run.state.step >= run.expert.stop:
            raise OutOfOrder(f"request {key} has no step to run here; call begin, or collect what is done")
        with self._fits(work.plan.request):
            event = run.step()
        if event.step == run.expert.stop:
            work.state, work.run = run.state, None  # its keys make room
        return self._runtime.compile_s - before, event.step

    def decode(self, key: str) -> Output:
        """Decode what `prepare_decode` has put here, encoding frames as they come: as above, an `EncodedVideo`.

        Raises `OutputError` on every host when the first one can't write the mp4.
        """
        before, work = self._runtime.compile_s, self._take(key, _Decoding)
        with self._fits(work.request), Mp4(work.request.fps) as video:
            for _, planes in stages.decode_chunks(self._runtime, work.frames, self._progress):
                if self._first:  # a failure is kept to the end: the other hosts wait in the next chunk's exchange
                    video.add(np.asarray(planes))
            if self._first:
                video.finish()
        failure = same_everywhere(str(video.failure or ""))
        if failure:
            raise OutputError(failure)
        return self._output((self._runtime.compile_s - before, []), lambda: mp4(video.content))

    # ---- beside the lockstep: no collective

    def check_adapters(self, plan: RequestPlan) -> None:
        """Read a request's adapters, which then are in host memory, or raise what `fetch_adapters` would."""
        self._runtime.fetch_adapters(plan.request.loras, self._stages_of(plan))

    def fetch_adapters(self, plan: RequestPlan) -> None:
        """Read a request's adapters into host memory, from wherever they lie; `prepare_denoise` takes them from there.

        This is what the request runs with on this slice, whatever becomes of the files meanwhile.
        """
        self._fetched.put(plan, self._runtime.fetch_adapters(plan.request.loras, self._stages_of(plan)))

    def prepare_encode(self, key: str, request: ResolvedRequest) -> int:
        """Put what the encoder needs of a request's image on the devices; return its bytes."""
        inputs = stages.image_inputs(self._runtime, request)
        if inputs is None:
            raise OutOfOrder(f"request {key} has no image and no video; its prompts are all there is to encode")
        self._work[key] = _Encoding(request, inputs)
        return sum(pixels.nbytes for pixels in inputs.chunks)

    def prepare_denoise(
        self,
        key: str,
        plan: RequestPlan,
        prompt: Payload,
        negative: Payload | None = None,
        image: Payload | None = None,
        state: Payload | None = None,
    ) -> int:
        """Put a request's inputs for the experts on the devices; return the bytes of all payloads.

        A request with adapters has had them fetched: neither this nor any step asks a disk or the network for them.

        prompt, negative  `TextEmbedding`; image  `ImageCondition`
        state             `DenoiseState` to go on from; the one before the first step when left out
        """
        plan = plan.with_request(dataclasses.replace(plan.request, loras=self._fetched.take(plan)))
        text, other = _unpacked(TextEmbedding, prompt), _unpacked(TextEmbedding, negative)
        condition = _unpacked(ImageCondition, image) or ImageCondition()
        if text is None:
            raise OutOfOrder(f"request {key} comes without its prompt's embeddings; encode_text makes them")
        conditioning = Conditioning(
            text.values, None if other is None else other.values, condition.image, condition.image_latents
        )
        start = _unpacked(DenoiseState, state) or stages.initial_state(
            self._runtime.model, plan, video=condition.video_latents
        )
        placed = stages.device_state(self._runtime, plan, start)
        mine = plan.experts_on(self._stages)
        if not mine:
            raise OutOfOrder(f"request {key} has no step on {', '.join(self._stages)}; leave this pool out")
        inputs: dict[str, stages.ExpertInputs] = {}
        for expert in mine:
            twin = next((inputs[e.stage] for e in mine if e.stage in inputs and e.guided == expert.guided), None)
            inputs[expert.stage] = twin or stages.expert_inputs(self._runtime, expert, conditioning)
        self._work[key] = _Denoising(plan, inputs, placed)
        return sum(given.nbytes for given in (prompt, negative, image, state) if given is not None)

    def prepare_decode(self, key: str, request: ResolvedRequest, state: Payload) -> int:
        """Put final latents, from the last expert's `collect`, on the devices; return their bytes."""
        given = _unpacked(DenoiseState, state)
        shape = self._spec.decoded_shape(request)
        if given is None or given.step != request.steps or given.latents.shape != shape:
            found = "nothing" if given is None else f"step {given.step}, latents {given.latents.shape}"
            raise OutOfOrder(f"the decoder was given {found}; this request needs step {request.steps}, latents {shape}")
        self._work[key] = _Decoding(request, stages.decoder_inputs(self._runtime, given.latents))
        return state.nbytes

    def snapshot(self, key: str) -> Output:
        """Copy out the latest state that can be gone on from, while the next step may run: (step, `DenoiseState`)."""
        work = self._get(key, _Denoising)
        run = work.run  # read once: the other thread may end it meanwhile
        state = work.state if run is None else run.resumable
        return self._output(state.step, lambda: stages.to_host(state))

    def collect(self, key: str) -> Output:
        """Copy out the state that a request has reached and let go of it: (step, `DenoiseState`).

        After the last step that is what the decoder takes: finished latents, without the solver's history.
        """
        work = self._take(key, _Denoising)
        state = _state(work)

        def result() -> DenoiseState:
            given = next(iter(work.inputs.values())).image_latents
            done = stages.finished(self._runtime.model, work.plan.request, state, given)
            return dataclasses.replace(done, history=()) if done.step == work.plan.request.steps else done

        return self._output(state.step, result)

    def drop(self, key: str) -> None:
        """Let go of a request, if it is here; none of its steps may be running."""
        self._work.pop(key, None)

    def keys(self) -> list[str]:
        """Return the requests that are held here."""
        return sorted(self._work)

    # ----

    @contextlib.contextmanager
    def _fits(self, request: ResolvedRequest) -> Iterator[None]:
        """Note that a size fits if the block ends well; raise `DoesNotFit` with the nearest that does if it doesn't."""
        size = (request.height, request.width, request.frames)
        try:
            yield
        except DoesNotFit as error:
            self._fitting.discard(size)
            remedy = "no size is known to fit yet"
            if self._fitting:
                height, width, frames = max(self._fitting, key=math.prod)
                remedy = f"the nearest that is known to fit is {width}x{height} with {frames} frames"
            asked = f"{request.width}x{request.height} with {request.frames} frames"
            raise DoesNotFit(f"{asked} doesn't fit the memory of this slice; {remedy} ({error})") from None
        self._fitting.add(size)
        if len(self._fitting) > _SIZES:
            self._fitting.remove(min(self._fitting, key=math.prod))

    # ----

    def _output(self, value: Any, payload: Callable[[], Any]) -> Output:
        """Copies to the host, and into the object store, on the first host alone."""
        return Output(value, pack(payload()) if self._first else None)

    def _get(self, key: str, kind: type[_Work]) -> _Work:
        work = self._work.get(key)
        if not isinstance(work, kind):
            raise OutOfOrder(f"request {key} is not ready for this; call {_PREPARED_BY[kind]} first")
        return work

    def _take(self, key: str, kind: type[_Work]) -> _Work:
        work = self._get(key, kind)
        del self._work[key]
        return work

    def _stages_of(self, plan: RequestPlan) -> list[str]:
        """Return the denoising stages of a request that are hosted here."""
        return [expert.stage for expert in plan.experts_on(self._stages)]

    def _check_stage(self, stage: str) -> None:
        if stage not in self._stages:
            raise OutOfOrder(f"{stage} is not hosted here ({', '.join(self._stages)}); ask a pool that hosts it")


def _state(work: _Denoising) -> DenoiseState:
    run = work.run  # read once: the other thread may end it meanwhile
    return work.state if run is None else run.state


def _unpacked(kind: type[_Value], payload: Payload | None) -> _Value | None:
    if payload is None:
        return None
    value = unpack(payload)
    if not isinstance(value, kind):
        raise OutOfOrder(f"a {payload.kind} was given where a {kind.__name__} belongs; give that stage's payload")
    return value
