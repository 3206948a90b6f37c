"""Cycles of Pallas calls: each kernel is compiled once, without its program, and its bundle counts are stored."""

import contextlib
import functools
import json
import logging
import math
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wan_tpu.aot import key
from wan_tpu.aot.topology import Hardware
from wan_tpu.pricing import bundles, kernel_calls
from wan_tpu.pricing.bundles import Body, KernelBundles
from wan_tpu.pricing.kernel_calls import KernelCall
from wan_tpu.versions import installed_version

_log = logging.getLogger(__name__)
_counting: dict[Path, threading.Lock] = {}  # By the file that keeps a kernel's count.


@dataclass(frozen=True)
class StepBundles:
    """Bundles of one grid step."""

    products: int  # Those around its matrix products.
    other: int = 0  # All others, which also run at every step.
    idle: int = 0  # Of `products`, those before the first product and after the last of each run of a loop.


# Returns the bundles of calls on a host's chip with some TensorCores a device; raises `CompileError`.
CountBundles = Callable[[Sequence[KernelCall], str, int], list[StepBundles]]


class KernelPrices:
    """Bundles per grid step of every requested kernel, stored in a folder; call it to price a Pallas call.

    A TensorCore issues one bundle per cycle, so the bundles of the grid's body times its iterations is the time when
    nothing stalls. On some chips the compiler schedules products faster than the matrix units can accept them at their
    peak (v5p, v5e; linear layers on v7x): products then wait for the units, which are idle before the first product and
    after the last. A schedule that is no shorter than its products at their peak is taken as it is: on v6e some of them
    are queued. Grid steps that do less than the costliest, such as those with a part of a block of keys, count in
    proportion to their products.
    """

    def __init__(self, folder: Path, hardware: Hardware, cores: int, count: CountBundles) -> None:
        """Price kernels on a chip.

        Args:
            folder: Where the counts are stored.
            cores: TensorCores of one device.
            count: Counts the bundles of calls.
        """
        self._folder = folder
        self._hardware = hardware
        self._cores = cores
        self._macs_a_cycle = hardware.peak_flops / 2 / hardware.clock_hz / cores
        self._beyond = hardware.grid_step_s * hardware.clock_hz  # Cycles of a grid step that no bundle accounts for.
        self._count = count

    def __call__(self, call: KernelCall) -> float | None:
        """Return the cycles of one call; None, and the reason in the log, when it can't be compiled alone."""
        try:
            counts = self.bundles(call)
        except bundles.CompileError as error:
            _log.warning("the cycles of kernel %s with grid %s can't be counted: %s", call.name, call.grid, error)
            return None
        at_peak = call.macs / self._macs_a_cycle
        products = counts.products if counts.products >= at_peak else at_peak + counts.idle
        cycles = call.busy * products + counts.other + self._beyond
        return cycles * call.steps_a_core(self._cores)

    def bundles(self, call: KernelCall) -> StepBundles:
        """Return the bundles of one grid step; raises `CompileError`."""
        self.count([call])
        known = _read(self._file(call))
        assert known is not None, f"{self._file(call)} was damaged as soon as it was written"
        return known

    def count(self, calls: Iterable[KernelCall]) -> None:
        """Count together what was never counted; raises `CompileError` for a call that the compiler refuses.

        What several threads ask for at once is counted once.
        """
        files = {self._file(call): call for call in calls}
        with contextlib.ExitStack() as stack:
            for file in sorted(files):  # In this order no two threads wait for each other.
                stack.enter_context(_counting.setdefault(file, threading.Lock()))
            unknown = {file: call for file, call in files.items() if _read(file) is None}
            for file, call, counts in zip(
                unknown, unknown.values(), self._count_all(list(unknown.values())), strict=True
            ):
                _write(file, {"kernel": call.name, "grid": call.grid, "bundles": asdict(counts)})

    def _count_all(self, calls: list[KernelCall]) -> list[StepBundles]:
        if not calls:
            return []
        try:
            return self._count(calls, self._hardware.host_topology, self._cores)
        except bundles.CompileError:
            if len(calls) == 1:
                raise
            return [counts for call in calls for counts in self._count_all([call])]

    def _file(self, call: KernelCall) -> Path:
        return self._folder / f"kernel-{self._hardware.name}-{key.digest(f'{call.digest} {_describe_counter()}')}.json"


def _read(file: Path) -> StepBundles | None:
    """Return a stored count; None if it was never counted, or if the disk was full."""
    try:
        return StepBundles(**json.loads(file.read_text())["bundles"])
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return None


def _write(file: Path, counted: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")  # Others may count it, too.
    try:
        part.write_text(json.dumps(counted))
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


@functools.cache
def _describe_counter() -> str:
    """Identify the counter: the compiler, and the code that reads its output."""
    code = [Path(file).read_text() for file in (bundles.__file__, kernel_calls.__file__, __file__)]
    return key.digest(repr([installed_version("libtpu"), *code]))


def count_alone(calls: Sequence[KernelCall], host: str, cores: int) -> list[StepBundles]:
    """Compile calls for a chip of a host, without the programs around them; return the bundles of one step of each.

    These are the hot region and the bundles around it in the grid's loop. If the hot region is the body of a loop, it
    counts once per iteration, although its code exists only once; several loops in a step count as often as each runs.

    Args:
        cores: TensorCores of one device, which share the steps.

    Raises:
        CompileError: The compiler refuses one of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calls.json"
        kernel_calls.save(calls, path)
        counts = bundles.count_bundles(f"{kernel_calls.__file__}:load_saved", {"path": str(path)}, host)
    scopes = {scope: kernel for kernel in counts for scope in kernel.scope.split("/")}
    found = [scopes.get(kernel_calls.name_scope(number)) for number in range(len(calls))]
    if None in found:  # Of equal kernels the compiler writes one.
        if len(calls) == 1:
            raise bundles.CompileError(f"the compiler wrote no bundles of {calls[0].name}")
        return [bundles for call in calls for bundles in count_alone([call], host, cores)]
    return [_of_one_step(call, kernel, cores) for call, kernel in zip(calls, found, strict=True) if kernel]


def _of_one_step(call: KernelCall, kernel: KernelBundles, cores: int) -> StepBundles:
    if call.loops > 1:
        return step_bundles(kernel.loops, call.steps_a_core(cores))
    if call.repeats == 1:
        return StepBundles(kernel.hot.bundles, kernel.around, kernel.hot.idle)
    once = kernel.total - kernel.hot.bundles
    return StepBundles(once + kernel.hot.bundles * call.repeats, idle=once + kernel.hot.idle * call.repeats)


def step_bundles(loops: Mapping[tuple[int, ...], Body], steps: int) -> StepBundles:
    """Return the bundles of one of a core's `steps` grid steps, each as often as the loops around it run.

    The grid's loop is the outermost. Some compilers don't make its length a constant; it then counts as 1.

    Raises:
        CompileError: There is no loop over the steps.
    """
    if steps > 1:
        for is_grids in (lambda trips: trips >= steps, lambda trips: trips == 1):
            grid_loops = {trips[1:]: body for trips, body in loops.items() if trips and is_grids(trips[0])}
            if grid_loops:
                break
        loops = grid_loops
    if not loops:
        raise bundles.CompileError(f"no loop over {steps} grid steps")
    totals = [(math.prod(trips) * body.bundles, math.prod(trips) * body.idle) for trips, body in loops.items()]
    products, idle = max(totals)
    return StepBundles(products, sum(bundles for bundles, _ in totals) - products, idle)
