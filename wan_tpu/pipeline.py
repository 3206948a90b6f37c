"""The whole job on one machine: load a checkpoint, make videos."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from wan_tpu import stages
from wan_tpu.adapters.merging import Adapters
from wan_tpu.aot import key
from wan_tpu.aot.executables import Executables
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.data import Conditioning, DenoiseState, Video
from wan_tpu.errors import InvalidRequest
from wan_tpu.families.model import Model, open_model
from wan_tpu.progress import Progress, Silent
from wan_tpu.request import GenerationRequest, ResolvedRequest
from wan_tpu.runtime.mesh import MeshLike, make_mesh
from wan_tpu.runtime.runtime import Runtime
from wan_tpu.schedules.schedule import Schedule
from wan_tpu.spec import Expert


def load_pipeline(
    path_or_id: str | Path,
    dtype: str = "bfloat16",
    mesh: MeshLike = None,
    *,
    keep_weights: bool = True,
    executables: str | Path | None = None,
    progress: Progress | None = None,
) -> "Pipeline":
    """Open a checkpoint; its weights are read when a stage first needs them.

    path_or_id    diffusers directory, or hub id, OWNER/NAME
    dtype         "bfloat16" or "float32", of weights and activations; latents are float32 in all; "int8" and "float8":
                  bfloat16, and the matrices of the transformer's linear layers, and what they multiply, in 8 bits;
                  "int8-attention", "float8-attention": attention's logits, too
    mesh          (dp, sp, tp), {"dp": ..., "sp": ..., "tp": ...} or a jax Mesh with these axes; what is None or left
                  out takes the default of `mesh.fill_shape`
    keep_weights  False frees each component after its stage: one request in the least memory
    executables   folder of compiled programs (scripts/precompile.py), or one in gs://, to load in place of compiling;
                  what it doesn't have, or has from another version, is compiled and kept there by JAX, and the log
                  says why. Loading runs code from it
    progress      `Console()` to show bars; silent when left out

    Raises `CheckpointError`, `MeshError` or `InvalidInput` before anything large is read.
    """
    progress = progress or Silent()
    runtime = open_runtime(
        path_or_id, dtype, mesh, keep_weights=keep_weights, executables=executables, progress=progress
    )
    return Pipeline(runtime, progress)


class Pipeline:
    """A model ready to make videos; `runtime` has its weights, programs and times."""

    def __init__(self, runtime: Runtime[Model], progress: Progress) -> None:
        self.runtime = runtime
        self._progress = progress

    def resolve(self, request: GenerationRequest) -> ResolvedRequest:
        """Fill what a request leaves open with the model's settings and check that it fits model and mesh."""
        return self.runtime.model.spec.plan(request).request

    def generate(
        self, request: GenerationRequest, noise: np.ndarray | None = None, on_step: stages.OnStep | None = None
    ) -> Video:
        """Make one video.

        noise    initial latents [1, C, T, H, W] in place of those drawn from the seed
        on_step  called with a `StepEvent` after each denoising step; raising from it stops the run

        Raises `InvalidRequest` before any work, `UnhealthyResult` naming stage and step.
        """
        if not isinstance(request, GenerationRequest):
            raise InvalidRequest(f"the request is a {type(request).__name__}; give a GenerationRequest")
        resolved = self.resolve(request)
        if resolved.video is None:
            self.initial_state(resolved, noise)  # what is wrong with the noise is said before any work
        self.check_components()
        resolved = self.fetch_adapters(resolved)
        conditioning = self.encode(resolved)
        state = self.initial_state(resolved, noise, conditioning)
        state = self.denoise(resolved, conditioning, state, on_step=on_step)
        return Video(pixels=np.concatenate(list(self.decode(state.latents))), fps=resolved.fps)

    def check_components(self, *names: str) -> None:
        """Compare the files of components (all, when none is named) with their modules, by their headers alone.

        Raises `CheckpointError` naming what is missing, too many, of a wrong shape or cut off. Done once.
        """
        components = self.runtime.model.components
        self.runtime.check(name for name in components if not names or name in names)

    def fetch_adapters(self, request: ResolvedRequest) -> ResolvedRequest:
        """Return a resolved request with what its adapters' files hold now; no weights are needed for it.

        Raises `InvalidRequest` naming what doesn't fit the model, `Unavailable` when a file can't be read now.
        """
        stages_run = [expert.stage for expert in self.experts(request)]
        return dataclasses.replace(request, loras=self.runtime.fetch_adapters(request.loras, stages_run))

    def initial_state(
        self, request: ResolvedRequest, noise: np.ndarray | None = None, conditioning: Conditioning | None = None
    ) -> DenoiseState:
        """Return the state before the first step of a resolved request; with a video it needs the conditioning."""
        video = None if conditioning is None else conditioning.video_latents
        return stages.initial_state(self.runtime.model, request, noise, video)

    def encode(self, request: ResolvedRequest, warn: Callable[[str], object] = warnings.warn) -> Conditioning:
        """Encoder stage of a resolved request; `warn` is told when a prompt is cut."""
        return stages.encode(self.runtime, request, self._progress, warn)

    def denoise(
        self,
        request: ResolvedRequest,
        conditioning: Conditioning,
        state: DenoiseState,
        *,
        stop: int | None = None,
        on_step: stages.OnStep | None = None,
    ) -> DenoiseState:
        """Expert stages of a resolved request, from `state.step` up to step `stop` (all when left out)."""
        return stages.denoise(self.runtime, request, conditioning, state, self._progress, stop=stop, on_step=on_step)

    def decode(self, latents: np.ndarray) -> Iterator[np.ndarray]:
        """Decoder stage: yield float32 [T, H, W, 3] in [0, 1], chunk by chunk, and check the whole at the end."""
        return stages.decode(self.runtime, latents, self._progress)

    def decode_planes(self, latents: np.ndarray) -> Iterator[np.ndarray]:
        """Decoder stage: yield uint8 [T, 3, H, W], green, blue and red, chunk by chunk, for `wan_tpu.media.mp4.Mp4`."""
        chunks = stages.decode_chunks(self.runtime, stages.decoder_inputs(self.runtime, latents), self._progress)
        return (np.asarray(planes) for _, planes in chunks)

    def schedule(self, request: ResolvedRequest) -> Schedule:
        """Return the numbers of a resolved request's steps."""
        return self.runtime.model.spec.schedule(request)

    def experts(self, request: ResolvedRequest) -> tuple[Expert, ...]:
        """Return which expert runs which steps of a resolved request."""
        return self.runtime.model.spec.experts(request)


def open_runtime(
    path_or_id: str | Path,
    dtype: str,
    mesh: MeshLike,
    *,
    keep_weights: bool = True,
    executables: str | Path | None = None,
    progress: Progress = Silent(),  # noqa: B008 (has no state)
) -> Runtime[Model]:
    """Open a checkpoint for a mesh; arguments and errors are those of `load_pipeline`."""
    model = open_model(Checkpoint(path_or_id))
    placed = make_mesh(mesh, heads=model.spec.heads)
    stored = None if executables is None else Executables(executables, key.settings(model.config, dtype))
    if stored is not None:
        stored.keep_compiled()
    return Runtime(
        model,
        placed,
        dtype,
        keep_weights=keep_weights,
        executables=stored,
        adapters=Adapters(),
        progress=progress,
    )
