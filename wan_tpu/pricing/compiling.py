"""Compile programs of a model for a described slice, in separate processes, and store the compiler's reports.

A separate process is used because a full-size program takes gigabytes to compile, and because the compiler may crash
instead of refusing. The scheduled HLO, the memory it needs and the seconds it took are stored under a key of everything
that affects them; and again under one of the traced program, which several models may have.
"""

import contextlib
import dataclasses
import functools
import gzip
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from wan_tpu.aot import key
from wan_tpu.aot.topology import DescribedSlice, Hardware
from wan_tpu.errors import DoesNotFit, Unavailable
from wan_tpu.pricing.bodies import put_bodies, take_bodies
from wan_tpu.reference import restore_references
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.memory import GIB, MemoryNeed, needed_bytes

if TYPE_CHECKING:
    from wan_tpu.aot.programs import StagePrograms

_CGROUP = Path("/sys/fs/cgroup")
_COMPILER_BYTES = 6 * 2**30  # Memory of a process that compiles a step at full size.


@dataclass(frozen=True)
class Job:
    """A program to compile: one of `stage_programs` for a published model, a request, a slice and a mesh."""

    model: str
    program: str
    slice: DescribedSlice
    mesh: tuple[int, int, int]
    request: dict[str, Any]  # The fields of the resolved request, without pixels, as JSON.
    dtype: str
    # What the program depends on besides slice and build, as `key.describe_program` says. The request isn't part of it:
    # it acts only through the shapes of the program's arguments.
    depends_on: Mapping[str, str]
    stages: tuple[str, ...]  # Stages that have the program: others aren't traced to compile it.
    images: int | None = None  # How many images the request has; the usual number if None.
    text_rows: int | None = None  # `Model.text_rows`, if not the usual.
    decoder: str | None = None  # As for `published_spec`.

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
        tuples = {name: tuple(fields[name]) for name in ("mesh", "stages")}
        return cls(**fields | tuples | {"slice": DescribedSlice(**slice_)})


@dataclass(frozen=True)
class Compiled:
    """The compiler's report on a program, for one device."""

    # The seconds of tracing and compiling by the clock, without the bodies of kernels.
    compile_s: float
    compile_cpu_s: float  # The same summed over the cores, which depends less on what else the machine does.
    weights_bytes: int
    other_bytes: int = 0  # Its other arguments, results and temporaries.
    over_bytes: int = 0  # The bytes by which it exceeds the memory, if that is why it can't be compiled.
    refused: str = ""  # Why it can't be compiled, or empty.
    # The size of the program itself, which stays on the device after its first call; without the bodies of kernels.
    code_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return needed_bytes([MemoryNeed(self.weights_bytes + self.code_bytes, self.other_bytes)])


class Compilers:
    """Child processes that compile programs, as many at a time as this machine has cores and memory for.

    Attributes:
        count: How many these are.
    """

    def __init__(self, cache: Path) -> None:
        """Start nothing yet.

        Args:
            cache: The folder that keeps what was compiled.
        """
        self.count = max(1, min(_count_cores(), _count_memory() // _COMPILER_BYTES))
        self._all = [_Compiler(cache) for _ in range(self.count)]
        self._idle: queue.SimpleQueue[_Compiler] = queue.SimpleQueue()
        for compiler in self._all:
            self._idle.put(compiler)

    def compile(self, job: Job) -> tuple[Compiled, str]:
        """Return the report on a job and the scheduled HLO (empty if refused), from the cache if possible.

        Raises:
            Unavailable: The process was killed, or all are closed.
            KeyboardInterrupt: The process was interrupted, as Ctrl-C does to all processes of a terminal.
        """
        compiler = self._idle.get()
        try:
            return compiler.compile(job)
        finally:
            self._idle.put(compiler)

    def close(self) -> None:
        """End the processes; what they still compile fails in its thread."""
        for compiler in self._all:
            compiler.close()


class _Compiler:
    """A child process that compiles one program after the other. If it ends, another one compiles the next."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._child: subprocess.Popen[str] | None = None
        self._errors: IO[bytes] | None = None
        self._starting, self._closed = threading.Lock(), False

    def compile(self, job: Job) -> tuple[Compiled, str]:
        result, hlo = self._cache / f"{job.digest}.json", self._cache / f"{job.digest}.hlo.gz"
        known = _read(result, hlo)
        if known is None:
            result.unlink(missing_ok=True)
            self._cache.mkdir(parents=True, exist_ok=True)
            if cause := self._ask(json.dumps([dataclasses.asdict(job), str(self._cache / job.digest)])):
                return Compiled(0.0, 0.0, 0, refused=f"the compiling process ended with {cause}"), ""
            known = _read(result, hlo)
            assert known is not None, f"{hlo} was damaged as soon as it was written"
        return known

    def _ask(self, question: str) -> str:
        """Have the child answer; return its exit status and last error if it ends instead."""
        with self._starting:
            child, errors = self._start()
        assert child.stdin is not None and child.stdout is not None
        before = os.fstat(errors.fileno()).st_size  # What earlier jobs have written.
        with contextlib.suppress(BrokenPipeError):
            print(question, file=child.stdin, flush=True)
        if child.stdout.readline():
            return ""
        child.wait()
        self._check_open()
        errors.seek(before)
        lines = errors.read().decode(errors="replace").strip().splitlines() or ["no message"]
        last = next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception): ", line)), lines[-1])
        self._end_child()
        if child.returncode == -signal.SIGINT:
            raise KeyboardInterrupt
        if child.returncode in (-signal.SIGKILL, -signal.SIGTERM):
            raise Unavailable(
                f"a compiling process was killed ({signal.Signals(-child.returncode).name}), perhaps for lack of "
                "memory; end other programs of this machine, and start again (what is compiled is kept)"
            )
        return f"{child.returncode}: {last}"

    def _start(self) -> "tuple[subprocess.Popen[str], IO[bytes]]":
        """Return the child and the file of its errors; start it if there is none."""
        self._check_open()
        if self._child is None or self._errors is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
            self._child = subprocess.Popen(
                [sys.executable, "-m", __name__],
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        return self._child, self._errors

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the compiling processes have ended, because another program failed; start again")

    def close(self) -> None:
        with self._starting:
            self._closed = True
            self._end_child()

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None


def _count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its container's."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):  # Of cgroups, version 2 and 1.
        with contextlib.suppress(OSError, ValueError):  # Without a limit, "max" is in the first.
            sizes.append(int((_CGROUP / file).read_text()))
    return min(sizes)


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


def _answer() -> None:
    """Compile what each line asks for, and answer it with an empty line: the child's side of `_Compiler`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What else writes to standard output answers nothing.
    for line in sys.stdin:
        job, result = json.loads(line)
        _compile(Job.from_json(json.dumps(job)), Path(result))
        print(file=answers, flush=True)


@functools.lru_cache(maxsize=3)  # A plan has jobs of encoder, experts and decoder.
def _list_programs(text: str) -> "StagePrograms":
    """Return the programs of some stages of a plan; `text` is what `Job.from_json` reads, of any of their jobs."""
    from wan_tpu.aot.programs import AbstractRuntime, stage_programs  # Importing torch and diffusers takes seconds.
    from wan_tpu.families.model import published_model
    from wan_tpu.runtime.mesh import make_mesh

    job = Job.from_json(text)
    published = published_model(job.model, job.decoder)
    if job.text_rows is not None:
        published = published.for_text(job.text_rows)
    placed = make_mesh(job.mesh, heads=published.spec.heads, devices=job.slice.devices())
    request = ResolvedRequest(**restore_references(job.request))
    return stage_programs(AbstractRuntime(published, placed, job.dtype), request, job.stages, images=job.images)


def _compile(job: Job, result: Path) -> None:
    """Compile a job and write `result`.json and .hlo.gz."""
    import jax

    # All jobs of the same stages are the same but for these two fields.
    shared = dataclasses.asdict(dataclasses.replace(job, program="", depends_on={}))
    program, args, _ = _list_programs(json.dumps(shared, sort_keys=True))[job.program]
    weights = sum(_count_shard_bytes(leaf) for leaf in jax.tree.leaves(args[0]))
    start, start_cpu = time.perf_counter(), time.process_time()

    def measure_taken() -> tuple[float, float]:
        return time.perf_counter() - start, time.process_time() - start_cpu

    same, hlo = None, ""
    try:
        if weights > job.slice.hardware.hbm_bytes:
            raise DoesNotFit(
                f"its weights alone take {weights / GIB:.1f} GiB of a device",
                needed_bytes=weights,
                device_bytes=int(job.slice.hardware.hbm_bytes),
            )
        lowered = program.lower(*args)
        same = result.with_name(f"program-{_digest_program(job, lowered.as_text(), weights)}")
        if (known := _read(same.with_suffix(".json"), same.with_suffix(".hlo.gz"))) is not None:
            compiled, hlo = known
        else:
            bodies = take_bodies(lowered)
            built = program.compile_lowered(lowered, *args)
            seconds = measure_taken()
            memory = built.memory_analysis()
            # A program that uses few of the weights doesn't take all of them as arguments.
            inputs = max(0, memory.argument_size_in_bytes - weights)
            other = inputs + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
            compiled = Compiled(*seconds, weights, other, code_bytes=memory.generated_code_size_in_bytes)
            hlo = put_bodies(built.as_text(), bodies)
    except DoesNotFit as error:
        compiled = describe_refusal(error, measure_taken(), weights)
    if hlo:
        result.with_suffix(".hlo.gz").write_bytes(gzip.compress(hlo.encode()))
    result.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(compiled)))
    if same is None or known is not None:
        return
    for suffix in (".hlo.gz", ".json"):
        with contextlib.suppress(OSError):  # Another process has just compiled it, too, or a refusal has no HLO.
            same.with_suffix(suffix).unlink(missing_ok=True)
            os.link(result.with_suffix(suffix), same.with_suffix(suffix))


def _digest_program(job: Job, text: str, weights: int) -> str:
    """Return a digest of all that the report on a traced program depends on: models of a family share programs."""
    build = {name: value for name, value in key.describe_build().items() if name != "source"}
    answers = [field.name for field in dataclasses.fields(Compiled)]
    return key.digest(json.dumps([text, weights, job.slice.topology, job.slice.host_bounds, build, answers]))


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
    _answer()
