"""Compile one program of a model for a described slice, in a separate process, and store the compiler's report.

A separate process is used because a full-size program takes gigabytes to compile, and because the compiler may crash
instead of refusing. The scheduled HLO, the memory it needs and the seconds it took are stored under a key of everything
that affects them.
"""

import dataclasses
import gzip
import json
import os
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan_tpu.aot import key
from wan_tpu.aot.topology import DescribedSlice, Hardware
from wan_tpu.errors import DoesNotFit
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.memory import MemoryNeed, needed_bytes


@dataclass(frozen=True)
class Job:
    """A program to compile: one of `stage_programs` for a published model, a request, a slice and a mesh.

    Attributes:
        model: The published model.
        program: The program's name.
        slice: The slice, described.
        mesh: The sizes of the mesh's axes.
        request: The fields of the resolved request, without pixels, as JSON.
        dtype: The precision.
        depends_on: What the program depends on besides slice and build, as `key.describe_program` says. The request
            isn't part of it: it acts only through the shapes of the program's arguments.
        images: How many images the request has; the usual number if None.
        text_rows: `Model.text_rows`, if not the usual.
    """

    model: str
    program: str
    slice: DescribedSlice
    mesh: tuple[int, int, int]
    request: dict[str, Any]
    dtype: str
    depends_on: Mapping[str, str]
    images: int | None = None
    text_rows: int | None = None

    @property
    def digest(self) -> str:
        """The result's key: a digest of the program, the topology, the build and what is stored."""
        answers = [field.name for field in dataclasses.fields(Compiled)]
        question = [dict(self.depends_on), self.slice.topology, self.slice.host_bounds, key.describe_build(), answers]
        return key.digest(json.dumps(question, sort_keys=True))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """Read what `json.dumps(dataclasses.asdict(job))` wrote."""
        fields = json.loads(text)
        slice_ = fields.pop("slice")
        slice_ |= {name: tuple(slice_[name]) for name in ("host_bounds", "wraps")}
        slice_["hardware"] = Hardware(**slice_["hardware"])
        return cls(**fields | {"mesh": tuple(fields["mesh"]), "slice": DescribedSlice(**slice_)})


@dataclass(frozen=True)
class Compiled:
    """The compiler's report on a program, for one device.

    Attributes:
        compile_s: The seconds of tracing and compiling by the clock.
        compile_cpu_s: The same summed over the cores, which depends less on what else the machine does.
        weights_bytes: Its weights.
        other_bytes: Its other arguments, results and temporaries.
        over_bytes: The bytes by which it exceeds the memory, if that is why it can't be compiled.
        refused: Why it can't be compiled, or empty.
        code_bytes: The size of the program itself, which stays on the device after its first call.
    """

    compile_s: float
    compile_cpu_s: float
    weights_bytes: int
    other_bytes: int = 0
    over_bytes: int = 0
    refused: str = ""
    code_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All memory it needs."""
        return needed_bytes([MemoryNeed(self.weights_bytes + self.code_bytes, self.other_bytes)])


def compile_job(job: Job, cache: Path) -> tuple[Compiled, str]:
    """Return the compiler's report on a job and the scheduled HLO (empty if refused), from the cache if possible."""
    result, hlo = cache / f"{job.digest}.json", cache / f"{job.digest}.hlo.gz"
    known = _read(result, hlo)
    if known is None:
        result.unlink(missing_ok=True)
        cache.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(job)), str(cache / job.digest)]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not result.exists():
            lines = child.stderr.strip().splitlines() or ["no message"]
            last = next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception): ", line)), lines[-1])
            return Compiled(0.0, 0.0, 0, refused=f"the compiling process ended with {child.returncode}: {last}"), ""
        known = _read(result, hlo)
        assert known is not None, f"{hlo} was damaged as soon as it was written"
    return known


def is_known(job: Job, cache: Path) -> bool:
    """Return whether a job was compiled before."""
    return (cache / f"{job.digest}.json").exists()


def _read(result: Path, hlo: Path) -> tuple[Compiled, str] | None:
    """Return the stored result of a job; None if there is none, or if it is damaged."""
    try:
        compiled = Compiled(**json.loads(result.read_text()))
        return compiled, "" if compiled.refused else gzip.decompress(hlo.read_bytes()).decode()
    except (OSError, EOFError, ValueError, TypeError, zlib.error):
        return None


def _compile(job: Job, result: Path) -> None:
    """Compile a job and write `result`.json and .hlo.gz: the child's side of `compile_job`."""
    import jax

    from wan_tpu.aot.programs import AbstractRuntime, stage_programs  # Importing torch and diffusers takes seconds.
    from wan_tpu.families.model import published_model
    from wan_tpu.runtime.mesh import make_mesh

    model = published_model(job.model)
    if job.text_rows is not None:
        model = model.for_text(job.text_rows)
    mesh = make_mesh(job.mesh, heads=model.spec.heads, devices=job.slice.devices())
    programs = stage_programs(
        AbstractRuntime(model, mesh, job.dtype), ResolvedRequest(**job.request), images=job.images
    )
    program, args, _ = programs[job.program]
    weights = sum(_count_shard_bytes(leaf) for leaf in jax.tree.leaves(args[0]))
    start, start_cpu = time.perf_counter(), time.process_time()

    def measure_taken() -> tuple[float, float]:
        return time.perf_counter() - start, time.process_time() - start_cpu

    try:
        built = program.compile(*args)
    except DoesNotFit as error:
        compiled = describe_refusal(error, measure_taken(), weights)
    else:
        seconds = measure_taken()
        memory = built.memory_analysis()
        # A program that uses few of the weights doesn't take all of them as arguments.
        inputs = max(0, memory.argument_size_in_bytes - weights)
        other = inputs + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
        compiled = Compiled(*seconds, weights, other, code_bytes=memory.generated_code_size_in_bytes)
        result.with_suffix(".hlo.gz").write_bytes(gzip.compress(built.as_text().encode()))
    result.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(compiled)))


def describe_refusal(error: DoesNotFit, seconds: tuple[float, float], weights: int) -> Compiled:
    """Return the report of a refused program, with the memory that the compiler says it needs."""
    needed, available = error.needed_bytes, error.device_bytes
    if needed is None or available is None:
        return Compiled(*seconds, weights, refused=str(error))
    return Compiled(*seconds, weights, needed - weights, needed - available, refused=str(error))


def _count_shard_bytes(leaf: Any) -> int:
    count = 1
    for size in leaf.sharding.shard_shape(leaf.shape):
        count *= size
    return count * leaf.dtype.itemsize


if __name__ == "__main__":
    _compile(Job.from_json(sys.argv[1]), Path(sys.argv[2]))
