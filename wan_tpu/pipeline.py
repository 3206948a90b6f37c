"""The Python interface for one machine: load a checkpoint, and make videos."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wan_tpu import stages
from wan_tpu.adapters.merging import AdapterCache
from wan_tpu.aot import kept, key
from wan_tpu.aot.executables import Executables
from wan_tpu.data import Conditioning, DenoiseState, Video
from wan_tpu.errors import InvalidInput, InvalidRequest
from wan_tpu.families import open_checkpoint
from wan_tpu.families.model import Model, open_model
from wan_tpu.licences import show_licence
from wan_tpu.plan import RequestPlan
from wan_tpu.previews.painter import Painter
from wan_tpu.previews.watching import Preview, work_with_previews
from wan_tpu.progress import Progress, Silent
from wan_tpu.request import GenerationRequest, ResolvedRequest
from wan_tpu.runtime.mesh import MeshLike, make_mesh
from wan_tpu.runtime.runtime import Runtime
from wan_tpu.stage_machine import Decode, DecodeSound, EncodeImage, EncodeText, Finish, Step
from wan_tpu.stages.written import Ending, cut_tail

OnStep = Callable[[stages.StepEvent], object]
OnPreview = Callable[[Preview], object]


def load_pipeline(
    path_or_id: str | Path,
    dtype: str | torch.dtype = "bfloat16",
    mesh: MeshLike = None,
    *,
    keep_weights: bool = True,
    executables: str | Path | None = None,
    progress: Progress | None = None,
    preview_decoder: str | Path | None = None,
) -> "Pipeline":
    """Open a checkpoint, and show a restrictive licence the first time. Weights are read when a stage first needs them.

    Args:
        path_or_id: Diffusers directory, hub id, or the name of a published model (`wan-tpu models`).
        dtype: Of weights and activations, "bfloat16" or "float32", or torch's of that name; latents are always
            float32. "int8" and "float8" mean bfloat16, except that the transformer's linear layers multiply 8-bit
            weights by 8-bit inputs. "int8-attention" and "float8-attention" compute attention's logits in 8 bits, too,
            "int8-attention-both" and "float8-attention-both" both of its products.
        mesh: (dp, sp, tp), {"dp": ..., "sp": ..., "tp": ...} or a jax Mesh with these axes. An axis that is None or
            missing takes the default of `mesh.fill_shape`.
        keep_weights: False frees each component after its stage, to make one video in the least memory.
        executables: Folder of compiled programs (scripts/precompile.py), here or in gs://, to load instead of
            compiling. A program that is missing, or was built by another version, is compiled, and JAX keeps it there;
            the log says why. Loading runs code from the folder.
        progress: `Console()` to show bars; silent by default.
        preview_decoder: A file of TAEHV for this model, with which previews show details (`wan_tpu.previews.taehv`).

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
        MeshError: The mesh doesn't fit the devices.
        InvalidInput: The model doesn't have that precision, there is no such folder of executables, or the preview's
            decoder isn't for this model.
    """
    progress = progress or Silent()
    precision = str(dtype).removeprefix("torch.")
    runtime = open_runtime(
        path_or_id, precision, mesh, keep_weights=keep_weights, executables=executables, progress=progress
    )
    pipeline = Pipeline(runtime, progress, Painter(runtime.model, preview_decoder))
    show_licence(runtime.model.spec)
    return pipeline


class Pipeline:
    """A model ready to make videos."""

    def __init__(self, runtime: Runtime[Model], progress: Progress, painter: Painter | None = None) -> None:
        self.runtime = runtime
        self.painter = Painter(runtime.model) if painter is None else painter
        self._progress = progress

    def plan(self, request: GenerationRequest) -> RequestPlan:
        """Plan a request: fill in every field that it leaves open, and determine what each stage has to do.

        Raises:
            InvalidRequest: The model can't make it.
        """
        plan = self.runtime.model.spec.plan(request)
        plan.check_prompt()
        return plan

    def generate(
        self,
        request: GenerationRequest | str | None = None,
        noise: np.ndarray | None = None,
        on_step: OnStep | None = None,
        on_preview: OnPreview | None = None,
        **fields: Any,
    ) -> Video:
        """Make one video: `generate(GenerationRequest(prompt="a cat"))` or `generate("a cat", seed=3)`.

        Args:
            request: The video to make, or its prompt.
            noise: Initial latents [1, C, T, H, W], to use instead of those drawn from the seed.
            on_step: Called with a `StepEvent` after each denoising step; raising from it stops the run.
            on_preview: Called with a `Preview` after each quarter of the steps, in another thread. The run doesn't wait
                for it, and goes on if it raises.
            fields: Fields of a `GenerationRequest`, where none is given.

        Raises:
            InvalidRequest: The model can't make what the request asks for. This is raised before any work is done.
            TypeError: There is no such field, or there are fields beside a request.
            UnhealthyResult: A stage gave NaN or Inf; the error names stage and step.
        """
        if isinstance(request, str):
            fields = {"prompt": request, **fields}
        elif request is not None and fields:
            raise TypeError(f"generate takes a request or fields, not both; put {', '.join(fields)} into the request")
        if request is None or isinstance(request, str):
            request = GenerationRequest(**fields)
        if not isinstance(request, GenerationRequest):
            raise InvalidRequest(f"the request is a {type(request).__name__}; give a GenerationRequest or its fields")
        plan = self.plan(request)
        run = self.make_executor(plan, noise=noise)
        self.check_components(*self.runtime.model.spec.list_components(plan.request))
        run.plan = self.fetch_adapters(plan)
        pixels, sound, ending, overlap = [], (None, None), None, self.runtime.model.spec.overlap
        work = run.work() if on_preview is None else work_with_previews(run, self.painter, on_preview)
        for operation, result in work:
            if isinstance(operation, Step) and on_step is not None:
                on_step(result)
            elif isinstance(operation, Finish) and overlap is not None:
                ending = Ending.of_state(overlap, result)
            elif isinstance(operation, DecodeSound):
                sound = result
            elif isinstance(operation, Decode):
                pixels.append(self.runtime.model.pixels(np.asarray(result[0])))
        tail = None if ending is None else cut_tail(self.runtime.model.spec, run.plan.request, ending, *sound)
        return Video(np.concatenate(pixels), run.plan.request.fps, *sound, tail)

    def make_executor(
        self,
        plan: RequestPlan,
        *,
        conditioning: Conditioning | None = None,
        state: DenoiseState | None = None,
        noise: np.ndarray | None = None,
        warn: stages.Warn = warnings.warn,
        around: stages.Around = lambda operation: nullcontext(),
    ) -> stages.LocalExecutor:
        """Return an executor for a request; arguments and errors are those of `LocalExecutor`."""
        return stages.LocalExecutor(
            self.runtime,
            plan,
            self._progress,
            conditioning=conditioning,
            state=state,
            noise=noise,
            warn=warn,
            around=around,
        )

    def check_components(self, *names: str) -> None:
        """Compare the weight files of components (by default, all) with their modules, reading only the files' headers.

        Each component is checked once.

        Raises:
            CheckpointError: Something is missing, superfluous, of the wrong shape or truncated; the message names it.
        """
        components = self.runtime.model.components
        self.runtime.check(name for name in components if not names or name in names)

    def fetch_adapters(self, plan: RequestPlan) -> RequestPlan:
        """Return the plan with the current content of its adapters' files. The model's weights aren't needed for this.

        Raises:
            InvalidRequest: An adapter doesn't fit the model.
            Unavailable: A file can't be read now.
        """
        adapters = stages.fetch_adapters(self.runtime, plan.request, [expert.stage for expert in plan.experts])
        return plan.with_request(dataclasses.replace(plan.request, loras=adapters))

    def initial_state(
        self, plan: RequestPlan, noise: np.ndarray | None = None, conditioning: Conditioning | None = None
    ) -> DenoiseState:
        """Return the state before the first step; a request that begins with a video needs its conditioning."""
        return self.make_executor(plan, conditioning=conditioning, noise=noise).state

    def encode(self, plan: RequestPlan, warn: stages.Warn = warnings.warn) -> Conditioning:
        """Run the encoder stage; `warn` is called when a prompt or an image is cut."""
        run = self.make_executor(plan, warn=warn)
        for _ in run.work(EncodeText, EncodeImage):
            pass
        return run.conditioning

    def denoise(
        self,
        plan: RequestPlan,
        conditioning: Conditioning,
        state: DenoiseState,
        *,
        stop: int | None = None,
        on_step: OnStep | None = None,
    ) -> DenoiseState:
        """Run the expert stages from `state.step` up to step `stop` (by default to the end); return the state."""
        run = self.make_executor(plan, conditioning=conditioning, state=state)
        for operation, result in run.work(Step, Finish, stop=stop):
            if isinstance(operation, Step) and on_step is not None:
                on_step(result)
        return run.state

    def decode(self, latents: np.ndarray, request: ResolvedRequest | None = None) -> Iterator[np.ndarray]:
        """Decoder stage: yield float32 [T, H, W, 3] in [0, 1], chunk by chunk, and check the whole at the end.

        Args:
            latents: The finished latents.
            request: The request, which a decoder that begins with noise needs.
        """
        return stages.decode(self.runtime, latents, self._progress, request)

    def decode_sound(self, state: DenoiseState, request: ResolvedRequest | None = None) -> tuple[np.ndarray, int]:
        """Decoder stage: return the sound of a finished state, float32 [channels, samples] in [-1, 1], and its rate.

        Args:
            state: The state.
            request: The request, which a sound needs that goes on from another video's, or that is given.

        Raises:
            InvalidInput: The model makes no sound.
        """
        if state.audio is None:
            raise InvalidInput(
                f"the state has no sound, because {self.runtime.model.spec.name} makes videos "
                "without sound; decode only the video"
            )
        return stages.decode_sound(self.runtime, np.asarray(state.audio), request)


def open_runtime(
    path_or_id: str | Path,
    dtype: str,
    mesh: MeshLike,
    *,
    keep_weights: bool = True,
    executables: str | Path | None = None,
    progress: Progress = Silent(),  # noqa: B008 (It has no state.)
) -> Runtime[Model]:
    """Open a checkpoint for a mesh; arguments and errors are those of `load_pipeline`."""
    model = open_model(open_checkpoint(path_or_id))
    device_mesh = make_mesh(mesh, heads=model.spec.heads)
    stored = None if executables is None else Executables(executables, key.settings(model.config, dtype))
    if stored is None:
        kept.keep_compiled()
    else:
        stored.keep_compiled()
    return Runtime(
        model,
        device_mesh,
        dtype,
        keep_weights=keep_weights,
        executables=stored,
        adapters=AdapterCache(),
        progress=progress,
    )
