"""The record beside a video: request, settings, versions, and the seconds and achieved rate of each stage."""

import dataclasses
import functools
import json
import os
import platform
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from wan_tpu.aot.kept import count_programs
from wan_tpu.data import write_json
from wan_tpu.plan import RequestPlan
from wan_tpu.request import ORIGINAL, ResolvedRequest
from wan_tpu.runtime.runtime import Runtime
from wan_tpu.stage_machine import Decode, DecodeSound, EncodeImage, EncodeText, Operation, Step
from wan_tpu.stages import StepEvent
from wan_tpu.switches import read_switches
from wan_tpu.versions import list_versions

_CONTENT = ("prompt", "negative_prompt", "image", "last_image", "video", "seed")  # Fields that change no operation.
_counted: weakref.WeakKeyDictionary[Runtime, dict[tuple[object, ...], int]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass
class StageRecord:
    """The time that one stage took, and its operations.

    Attributes:
        stage: Name of the stage.
        total_s: Seconds in total.
        load_s: Seconds spent reading weights.
        compile_s: Seconds spent compiling.
        host_s: Seconds of the steady state during which the host worked and the devices waited: tokenizing, preparing
            images, copying from stage to stage, and finishing the mp4. Work that the host does while the devices
            compute isn't counted.
        count: Counts the multiplications and additions of the models in this stage, with torch on the meta device. It
            is called once the video is finished, because it takes time.
    """

    stage: str
    total_s: float = 0.0
    load_s: float = 0.0
    compile_s: float = 0.0
    host_s: float = 0.0
    count: Callable[[], int] = lambda: 0

    @property
    def run_s(self) -> float:
        """Seconds of the steady state: the total without reading weights and compiling."""
        return max(self.total_s - self.load_s - self.compile_s, 1e-9)

    @functools.cached_property
    def flops(self) -> int:
        """Multiplications and additions of the models in this stage."""
        return self.count()

    @property
    def tflops_per_s(self) -> float:
        """The rate achieved in the steady state."""
        return self.flops / self.run_s / 1e12

    def to_json(self) -> dict[str, Any]:
        """Return all figures: times rounded to a tenth of a millisecond, the rate to four digits, however low."""
        times = {name: getattr(self, name) for name in ("total_s", "load_s", "compile_s", "run_s", "host_s")}
        rounded = {key: round(value, 4) for key, value in times.items()}
        rate = float(f"{self.tflops_per_s:.4g}")
        return {"stage": self.stage, **rounded, "flops": self.flops, "tflops_per_s": rate}


class Recorder:
    """Times the stages of one run on a runtime, and keeps its warnings."""

    def __init__(self, runtime: Runtime, plan: RequestPlan, warnings: Sequence[str] = ()) -> None:
        """Start the clock; `warnings` are those of the run's earlier stages, in other processes."""
        self.runtime, self._plan = runtime, plan
        self.warnings = list(warnings)
        self.stages: dict[str, StageRecord] = {}
        self._operations: dict[str, list[Operation]] = {}
        self._steps: list[dict[str, Any]] = []
        self._resumed_at = 0
        self._start = self._end = time.perf_counter()

    def resume(self, step: int, warnings: Sequence[str]) -> None:
        """Note that an earlier process has done so many steps, and what it has warned about."""
        self._resumed_at = step
        for warning in warnings:
            self.warn(warning)

    def set_length(self, plan: RequestPlan) -> ResolvedRequest:
        """Take over the length of a plan of the same request, which isn't open any more; return the request with it."""
        length = {name: getattr(plan.request, name) for name in ("frames", "max_seconds")}
        self._plan = self._plan.with_request(dataclasses.replace(self._plan.request, **length))
        return self._plan.request

    @contextmanager
    def operation(self, operation: Operation) -> Iterator[None]:
        """Time an operation as part of its stage; inside `stage` that stage's own block counts it."""
        operations = self._operations.setdefault(operation.stage, [])
        operations.append(operation)
        if isinstance(operation, DecodeSound | Decode):
            yield
            return
        with self.stage(operation.stage):
            yield

    @contextmanager
    def stage(self, name: str) -> Iterator[StageRecord]:
        """Time a block as (part of) stage `name`."""
        record = self.stages.setdefault(name, StageRecord(name, count=lambda: self._count_flops(name)))
        start, load, compiled = time.perf_counter(), self._load_s(), self.runtime.compile_s
        host = self.runtime.host_s
        try:
            yield record
        finally:
            self._end = time.perf_counter()
            record.total_s += self._end - start
            record.load_s += self._load_s() - load
            record.compile_s += self.runtime.compile_s - compiled
            record.host_s += self.runtime.host_s - host

    def _load_s(self) -> float:
        return sum(self.runtime.load_s.values())

    def _video(self) -> StageRecord:
        """Return the record of the whole video; work between its stages, such as drawing noise, is host time."""
        records = list(self.stages.values())
        total_s, load_s, compile_s, host_s = (
            sum(getattr(record, name) for record in records) for name in ("total_s", "load_s", "compile_s", "host_s")
        )
        whole_s = self._end - self._start
        return StageRecord(
            "video",
            whole_s,
            load_s,
            compile_s,
            host_s + whole_s - total_s,
            count=lambda: sum(record.flops for record in records),
        )

    def table(self) -> str:
        """Return the stages and the whole video as lines of text for people."""
        lines = [
            f"{'stage':<14}{'total s':>9}{'load s':>9}{'compile s':>11}{'run s':>9}{'of host s':>11}{'TFLOP/s':>10}"
        ]
        for record in (*self.stages.values(), self._video()):
            rate = f"{record.tflops_per_s:10.3f}" if record.flops else f"{'-':>10}"
            lines.append(
                f"{record.stage:<14}{record.total_s:9.2f}{record.load_s:9.2f}{record.compile_s:11.2f}"
                f"{record.run_s:9.2f}{record.host_s:11.2f}{rate}"
            )
        programs = count_programs()
        if any(programs.values()):
            lines.append(f"programs: {programs['loaded']} from the cache, {programs['compiled']} compiled and kept")
        return "\n".join(lines)

    def _count_flops(self, stage: str) -> int:
        """Return the multiplications and additions of the operations of a stage, which are counted once for a runtime.

        The next video of a session mostly differs in its texts, images and seed.
        """
        spec, request, operations = self.runtime.model.spec, self._plan.request, self._operations.get(stage, [])
        text_rows = spec.choose_text_rows(request, images=self._plan.images)
        settings = {name: value for name, value in request.to_json().items() if name not in _CONTENT}
        work = stage, self._plan.images, text_rows, len(operations), json.dumps(settings, sort_keys=True)
        counts = _counted.setdefault(self.runtime, {})
        if work not in counts:
            counts[work] = self._count_flops_of(operations, text_rows)
        return counts[work]

    def _count_flops_of(self, operations: Sequence[Operation], text_rows: int) -> int:
        request, model = self._plan.request, self.runtime.model.for_text(text_rows)
        prompts = sum(isinstance(operation, EncodeText) for operation in operations)
        experts = Counter(step.expert for step in operations if isinstance(step, Step))
        flops, images = 0, self._plan.images
        for expert, steps in experts.items():
            flops += steps * model.count_step(request, expert, images=images)
        # A text encoder that reads the prompt together with the images has no separate operation for the prompt.
        if any(isinstance(operation, EncodeText | EncodeImage) for operation in operations):
            flops += model.flops.encoder(request, prompts=prompts)
        if any(isinstance(operation, Decode) for operation in operations):
            flops += model.flops.decoder(model.spec.decoded_shape(request))
        return flops

    def note_step(self, event: StepEvent) -> None:
        """Note the time of a denoising step."""
        seconds = round(event.seconds, 4)
        self._steps.append({"stage": event.stage, "step": event.step, "timestep": event.timestep, "seconds": seconds})
        if event.skipped:
            self._steps[-1]["skipped"] = True

    def warn(self, message: str) -> None:
        """Warn, and keep the message."""
        self.warnings.append(message)
        warnings.warn(message, stacklevel=2)

    def save(self, path: Path, request: ResolvedRequest) -> None:
        """Write the record as JSON, completely or not at all."""
        write_json(
            path,
            {
                "request": request.to_json() | {"preset": request.preset or ORIGINAL},
                "settings": describe(self.runtime),
                "versions": list_versions(),
                "programs": count_programs(),
                "stages": [record.to_json() for record in self.stages.values()],
                "video": self._video().to_json(),
                "resumed_at": self._resumed_at,
                "steps": self._steps,
                "warnings": self.warnings,
            },
        )


def describe(runtime: Runtime) -> dict[str, Any]:
    """Describe where and how a runtime runs."""
    device = runtime.mesh.devices.flat[0]
    return {
        "model": runtime.model.checkpoint.source if runtime.model.checkpoint else None,
        "preset": runtime.model.spec.name,
        "dtype": runtime.dtype,
        "mesh": dict(runtime.mesh.shape),
        **read_switches(),
        "devices": f"{runtime.mesh.size} x {device.device_kind}",
        "boundary_ratio": runtime.model.spec.boundary_ratio,
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
    }


class Profiler:
    """Traces a few warm denoising steps with jax.profiler.

    The first step (which compiles) is left out; the trace covers the `STEPS` after it, or as many as there are.
    """

    STEPS = 3

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = 0
        self._tracing = False

    def after_step(self, event: StepEvent, *, is_last: bool) -> None:
        """Start or end the trace when it is time.

        Args:
            event: The step that was done.
            is_last: Whether it was its expert's last one. A trace never continues after it.
        """
        self._seen += 1
        if self._tracing and (self._seen > self.STEPS or is_last):
            self.stop()
        elif self._seen == 1 and event.step < event.steps:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True

    def stop(self) -> None:
        """End the trace, if one is running."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
