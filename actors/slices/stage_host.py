"""The actor on every host of a slice: it holds the weights and programs of a pool's stages, and runs them call by call.

Lockstep methods run on every host with the same arguments in the same order, because their programs exchange data
between hosts; they return how many seconds they spent compiling. All other methods exchange nothing, so threads of
their own run them while a step computes (the lanes in docs/cluster.md). A request that is invalid (`InvalidRequest`),
doesn't fit (`DoesNotFit`) or produces NaN (`UnhealthyResult`) raises the same error on every host, and the host goes on
with the next request.

A request's inputs and state are held on the devices under a key, which is the caller's name for the request.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from actors.observe.meters import ChipMeters
from actors.slices.fetched_adapters import FetchedAdapters, check_same_everywhere
from actors.slices.fitting_sizes import FittingSizes
from actors.slices.fragments import FragmentQueues
from actors.slices.messages import HostProgress, Report, ReportedProgress
from actors.slices.payloads import Payload, TextEmbedding, mp4, pack
from actors.slices.prepared import Decoding, Denoising, Encoding, OutOfOrder, PreparedRequests, place_latents, unpack_as
from actors.slices.profiling import HostProfile, open_to_dashboard
from cluster.gang.protocol import Output, report
from wan_tpu import stages
from wan_tpu.aot.key import describe_build
from wan_tpu.aot.precompile import compile_all
from wan_tpu.data import DenoiseState, ImageCondition, join_conditioning
from wan_tpu.errors import InvalidInput, OutputError
from wan_tpu.pipeline import open_runtime
from wan_tpu.plan import ENCODER, SECONDS, VIDEO, PromptText, RequestPlan
from wan_tpu.previews.painter import Painter, encode_jpeg
from wan_tpu.previews.watching import Preview, Previews
from wan_tpu.request import GenerationRequest, ResolvedRequest
from wan_tpu.runtime.processes import share_first
from wan_tpu.runtime.runtime import list_adapter_warnings
from wan_tpu.stage_machine import StageMachine, Step
from wan_tpu.stages.decode import finish_video
from wan_tpu.stages.encode import Adapters, fit_warnings
from wan_tpu.stages.written import cut_tail
from wan_tpu.switches import OVERLAPPED, OWN_KERNELS, set_switches

COMPILE_S = 1800.0  # Time limit for compiling one program.


class StageHost(HostProfile):
    """One host of a slice that runs a pool's stages. With several hosts, create it after joining `jax.distributed`."""

    def __init__(
        self,
        checkpoint: str,
        hosted: tuple[str, ...],
        mesh: tuple[int | None, int | None, int | None] | None = None,
        dtype: str = "bfloat16",
        executables: str | None = None,
        kernels: str = OWN_KERNELS,
        collectives: str = OVERLAPPED,
        preview_decoder: str | None = None,
        report: Report = report,
    ) -> None:
        """Open a model on all devices of the slice; `load` reads its weights.

        Args:
            checkpoint: A diffusers directory, or a hub id.
            hosted: The pool's stages, a part of `ModelSpec.stages`.
            mesh: Sizes of dp, sp and tp over all devices of the slice; None for the default.
            executables: The folder of compiled programs, or None.
            kernels: The kernels that this whole process uses (see `wan_tpu.switches`).
            collectives: How this whole process sends data between devices (see `wan_tpu.switches`).
            preview_decoder: The file of a tiny decoder for previews (`wan_tpu.previews.taehv`), or None.
            report: Called with a `HostProgress` now and then; by default this reports to the leader of the slice.

        Raises:
            InvalidInput: An argument doesn't fit the checkpoint or the devices. `open_runtime` raises others.
        """
        set_switches(kernels, collectives)
        self._report, self._progress = report, ReportedProgress(report)
        self._runtime = open_runtime(checkpoint, dtype, mesh, executables=executables, progress=self._progress)
        self._runtime.on_compile = self._report_compiling
        self._reported = HostProgress("", 0, 1)  # The latest report, which `_report_compiling` repeats.
        self._spec, self._stages = self._runtime.model.spec, hosted
        known = self._spec.components
        unknown = [stage for stage in hosted if stage not in known]
        if unknown or not hosted:
            stages_here = f"stages {', '.join(unknown) or '()'} of {checkpoint}"
            raise InvalidInput(
                f"{stages_here} can't be hosted, because the model doesn't have them; it has {', '.join(known)}"
            )
        self._components = [name for stage in hosted for name in known[stage]]
        self._first = jax.process_index() == 0
        open_to_dashboard()
        if jax.default_backend() == "tpu":
            ChipMeters(hosted).start()
        self._prepared = PreparedRequests()
        self._previews = Previews(Painter(self._runtime.model, preview_decoder))
        self._fragments = FragmentQueues()
        self._fetched: FetchedAdapters[Adapters] = FetchedAdapters(())
        self._fetched_texts: FetchedAdapters[dict[str, Adapters]] = FetchedAdapters({})
        self._sizes = FittingSizes()

    def software(self) -> dict[str, str]:
        """Return everything that affects the numbers that this host computes: code, packages and flags."""
        return describe_build()

    # ---- In lockstep.

    def load(self) -> None:
        """Check every file's headers, then read the weights and tokenizers of all stages."""
        self._runtime.check(self._components)
        for name in self._components:
            self._runtime.component(name)
            self._runtime.prepare(name)

    def warm_up(self, request: GenerationRequest) -> tuple[str, ...]:
        """Compile every program that a request like this one needs here, with any number of images.

        Returns:
            Descriptions of what doesn't fit the memory with an unusual number of images.

        Raises:
            DoesNotFit: A program doesn't fit with the usual number of images.
        """
        image, last = "t2v" not in self._spec.tasks, self._spec.last_images == "required"
        plan = self._spec.plan(request, image=request.image is not None or image, last=last)

        def report(name: str, number: int, count: int) -> None:
            self._reported = HostProgress(name, number, count)
            self._report(self._reported)

        with self._sizes.track(plan.request):
            stages_here = [stage for stage in self._stages if stage in plan.shapes]
            return compile_all(self._runtime, plan.request, stages_here, report)

    def _report_compiling(self, program: str | None) -> None:
        """Tell the leader that a program is being compiled, or that this is done, lest the call be counted as hung."""
        self._report(dataclasses.replace(self._reported, within_s=COMPILE_S if program else None))

    def encode_text(self, prompt: PromptText, adapted: RequestPlan | None = None) -> Output:
        """Encode one prompt: ((compile_s, warnings), `TextEmbedding`).

        If the model chooses the video's length, its seconds are a third value beside the warnings.

        The embedding's bits depend only on prompt, model, dtype, mesh and adapters.

        Args:
            adapted: The request's plan if `fetch_text_adapters` has fetched what its adapters change of the encoder.
        """
        if ENCODER not in self._stages:
            raise OutOfOrder(f"this pool hosts {', '.join(self._stages)}; call the one that hosts the {ENCODER}")
        before, warnings = self._runtime.compile_s, list[str]()
        adapters: dict[str, Adapters] = {}
        if adapted is not None:
            adapters = self._fetched_texts.take(adapted)
            check_same_everywhere([adapter for fetched in adapters.values() for adapter in fetched])
        values = stages.encode_prompt(self._runtime, prompt, warnings.append, adapters)
        seconds = map(float, values.get(SECONDS, ()))
        return self._output((self._runtime.compile_s - before, warnings, *seconds), lambda: TextEmbedding(values))

    def encode_image(self, key: str) -> Output:
        """Encode the image of `prepare_encode`: ((compile_s, warnings), `ImageCondition`)."""
        before, work = self._runtime.compile_s, self._prepared.take(key, Encoding)
        bar = self._progress.bar(ENCODER, work.inputs.parts)
        with self._sizes.track(work.request):
            condition = stages.encode_image(self._runtime, work.request, work.inputs, bar)
        warnings = [*work.inputs.warnings, *fit_warnings(self._runtime.model, work.request)]
        return self._output((self._runtime.compile_s - before, warnings), lambda: condition)

    def begin(self, key: str) -> tuple[float]:
        """Compute the text's keys for the expert that runs the next step: (compile_s,).

        This is called once for each expert. A pool that hosts both experts is called again at the boundary, and
        continues from the state that it holds.
        """
        before, work = self._runtime.compile_s, self._prepared.get(key, Denoising)
        state = work.last_state
        operation = StageMachine(work.plan, step=state.step).next_on(self._stages)
        if not isinstance(operation, Step):
            raise OutOfOrder(f"request {key} has no step to run on {', '.join(self._stages)}: {operation} comes next")
        expert = operation.expert
        if adapters := work.plan.request.adapters_for(expert.stage):
            check_same_everywhere(adapters)
        work.state, work.run = state, None  # Frees the other expert's text keys first.
        with self._sizes.track(work.plan.request):
            work.run = stages.ExpertRun(self._runtime, work.plan, expert, work.inputs[expert], state)
        return (self._runtime.compile_s - before,)

    def step(self, key: str) -> tuple[float, int] | tuple[float, int, tuple[int, bytes]]:
        """Run the next step of a request that has begun: (compile_s, number of steps done).

        If a preview of an earlier step has been painted meanwhile, it is the third part: (number of steps, JPEG).
        """
        before, work = self._runtime.compile_s, self._prepared.get(key, Denoising)
        run = work.run
        if run is None or run.state.step >= run.expert.stop:
            raise OutOfOrder(f"request {key} has no step to run here; call begin, or collect what is done")
        with self._sizes.track(work.plan.request):
            event = run.step()
        if event.step == run.expert.stop:
            work.state, work.run = run.state, None  # Frees the expert's text keys.
        compile_s = self._runtime.compile_s - before
        if work.previews and self._first:
            self._offer_preview(work, event)
        return (compile_s, event.step, work.painted.popleft()) if work.painted else (compile_s, event.step)

    def _offer_preview(self, work: Denoising, event: stages.StepEvent) -> None:
        painted = work.painted  # The thread mustn't keep the request's arrays on the devices.

        def show(preview: Preview) -> None:
            painted.append((preview.step, encode_jpeg(preview.picture)))

        image_latents = next(iter(work.inputs.values())).image_latents
        self._previews.offer(work.plan, event, image_latents, show)

    def decode(self, key: str) -> Output:
        """Decode the latents of `prepare_decode` and compress the frames: ((compile_s, warnings), `EncodedVideo`).

        Before the last chunk of a video, None takes the place of the `EncodedVideo`.

        Raises:
            OutputError: The first host can't write the mp4. All hosts raise this.
        """
        before, work = self._runtime.compile_s, self._prepared.take(key, Decoding)
        sizes, fragments = self._sizes.track(work.request), self._fragments.fill(key)
        with sizes, fragments as on_fragment, self._prepared.videos.add_to(key, work, on_fragment) as decoded:
            video, sound = decoded.mp4, None
            if work.audio is not None:
                sound = stages.decode_sound(self._runtime, work.audio, work.request)
                video.set_audio(*sound)
            for _, planes in stages.decode_chunks(self._runtime, work.frames, self._progress, decoded.colours):
                # A failure is raised only at the end, because the other hosts wait for this one in the next exchange.
                if self._first:
                    video.add(np.asarray(planes))
            if work.is_last:
                finish_video(self._runtime, decoded.colours)
                if self._first:
                    video.finish()
            failure = share_first(str(video.failure or ""))
            if failure:
                raise OutputError(failure)
        value = self._runtime.compile_s - before, list[str]()
        if not work.is_last:
            return Output(value, None)
        return self._output(value, lambda: mp4(video.content, video.last_frame, self._cut_tail(work, sound)))

    def _cut_tail(self, work: Decoding, sound: tuple[np.ndarray, int] | None) -> bytes | None:
        """Return the end of a video, if it is kept."""
        if work.ending is None or self._spec.overlap is None:
            return None
        samples, rate = sound or (None, None)
        tail = cut_tail(self._spec, work.request, work.ending, samples, rate)
        return None if tail is None else tail.dump()

    # ---- Beside the lockstep, without collectives.

    def check_adapters(self, plan: RequestPlan) -> None:
        """Read a request's adapters into host memory, or raise the error that `fetch_adapters` would."""
        stages.fetch_adapters(self._runtime, plan.request, self._stages_of(plan))

    def fetch_text_adapters(self, plan: RequestPlan) -> None:
        """Read what a request's adapters change of the encoder into host memory, where `encode_text` takes it."""
        self._fetched_texts.put(plan, self._runtime.fetch_text_adapters(plan.request.loras))

    def fetch_adapters(self, plan: RequestPlan) -> list[str]:
        """Read a request's adapters from files or the network into host memory, where `prepare_denoise` takes them.

        On this slice the request runs with this content, even if the files change meanwhile. The result is what the
        files ask for that isn't done.
        """
        adapters = stages.fetch_adapters(self._runtime, plan.request, self._stages_of(plan))
        self._fetched.put(plan, adapters)
        return list_adapter_warnings(adapters)

    def prepare_encode(self, key: str, request: ResolvedRequest) -> int:
        """Put the encoder's inputs on the devices: a request's image, and the prompt if it is encoded with the image.

        Returns:
            The bytes of all inputs.
        """
        inputs = stages.image_inputs(self._runtime, request)
        if inputs is None:
            raise OutOfOrder(f"request {key} has no image and no video; its prompts are all there is to encode")
        self._prepared.put(key, Encoding(request, inputs))
        return sum(array.nbytes for array in jax.tree.leaves((inputs.chunks, inputs.clip, inputs.read)))

    def prepare_denoise(
        self,
        key: str,
        plan: RequestPlan,
        prompt: Payload | None,
        negative: Payload | None = None,
        image: Payload | None = None,
        state: Payload | None = None,
        previews: bool = False,
    ) -> int:
        """Put a request's inputs for the experts on the devices.

        The request's adapters must have been fetched before. Neither this nor any step reads them from disk or network.

        Args:
            prompt: The prompt's `TextEmbedding`; None if the image's condition includes it.
            state: The `DenoiseState` to continue from; None to start before the first step.

        Returns:
            The bytes of all payloads.
        """
        if previews and self._first:
            self._previews.begin()
        plan = plan.with_request(dataclasses.replace(plan.request, loras=self._fetched.take(plan)))
        text, other = unpack_as(TextEmbedding, prompt), unpack_as(TextEmbedding, negative)
        condition = unpack_as(ImageCondition, image) or ImageCondition()
        texts = [encoded.values for encoded in (text, other) if encoded is not None]
        if not texts and condition.prompt is None:
            raise OutOfOrder(f"request {key} lacks its prompt's embeddings; call encode_text first")
        conditioning = join_conditioning(condition, *texts)
        start = unpack_as(DenoiseState, state) or stages.initial_state(
            self._runtime.model, plan, video=condition.video_latents, generator=condition.generator
        )
        placed_state = stages.device_state(self._runtime, plan, start)
        mine = plan.experts_on(self._stages)
        if not mine:
            raise OutOfOrder(f"request {key} has no step on {', '.join(self._stages)}; leave this pool out")
        kinds = {e: (e.guided, e.enlarges, self._spec.latent_shapes(plan.request, e.stop)[VIDEO]) for e in mine}
        shared = {
            kind: stages.expert_inputs(self._runtime, plan.request, expert, conditioning)
            for kind, expert in {kind: expert for expert, kind in kinds.items()}.items()
        }
        inputs = {expert: shared[kind] for expert, kind in kinds.items()}
        self._prepared.put(key, Denoising(plan, inputs, placed_state, previews=previews))
        return sum(payload.nbytes for payload in (prompt, negative, image, state) if payload is not None)

    def draw_ahead(self, key: str, request: ResolvedRequest) -> None:
        """Begin to draw the noise that the decoder takes with a request's latents, which aren't there yet."""
        self._prepared.draw_ahead(key, self._runtime, request)

    def prepare_decode(
        self, key: str, request: ResolvedRequest, state: Payload, fragments: bool = False, chunk: int | None = None
    ) -> int:
        """Put final latents, from the last expert's `collect`, on the devices; return their bytes.

        With `fragments`, `decode` keeps the mp4's fragments for `take_fragments`. With `chunk`, the latents are those
        of that chunk, from `copy_chunk`, and the mp4 stays open under this key until the last chunk.
        """
        noise = self._prepared.take_noise(key)
        self._prepared.put(key, place_latents(self._runtime, request, state, chunk, noise))
        if fragments and self._first:
            self._fragments.open(key)
        return state.nbytes

    def take_fragments(self, key: str) -> tuple[list[bytes], bool]:
        """Wait a while for fragments of a video that is being decoded; return them, and whether others may follow."""
        return self._fragments.take(key)

    def snapshot(self, key: str) -> Output:
        """Copy out the latest state that can be resumed: (step, `DenoiseState`). The next step may run meanwhile."""
        state = self._prepared.get(key, Denoising).resumable
        return self._output(state.step, lambda: stages.to_host(state))

    def copy_chunk(self, key: str, chunk: int) -> Output:
        """Copy out the latents of a denoised chunk: (the chunk's last step, `DenoiseState`)."""
        work = self._prepared.get(key, Denoising)
        return self._output(work.plan.chunk_stops[chunk], lambda: work.copy_chunk(chunk))

    def collect(self, key: str) -> Output:
        """Copy out the state that a request has reached, and release the request: (step, `DenoiseState`).

        After the last step, the state is the decoder's input: finished latents, without the solver's history.
        """
        work = self._prepared.take(key, Denoising)
        state = work.last_state

        def result() -> DenoiseState:
            image_latents = next(iter(work.inputs.values())).image_latents
            done = stages.finish_state(self._runtime.model, work.plan.request, state, image_latents)
            is_final = done.step == work.plan.steps
            return dataclasses.replace(done, history=(), audio_history=()) if is_final else done

        return self._output(state.step, result)

    def drop(self, key: str) -> None:
        """Release a request, if it is held here; none of its steps may be running."""
        self._prepared.drop(key)
        self._fragments.drop(key)

    def list_keys(self) -> list[str]:
        return sorted({*self._prepared.list_keys(), *self._fragments.list_keys()})

    # ----

    def _output(self, value: Any, payload: Callable[[], Any]) -> Output:
        """Return a result; only the first host copies the payload out, to the object store."""
        return Output(value, pack(payload()) if self._first else None)

    def _stages_of(self, plan: RequestPlan) -> list[str]:
        """Return the denoising stages of a request that are hosted here."""
        return [expert.stage for expert in plan.experts_on(self._stages)]
