"""Cycles of Pallas calls: each kernel is compiled alone, once, and its bundle counts are stored."""

import functools
import json
import logging
import math
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from wan_tpu.aot import key
from wan_tpu.aot.topology import Hardware
from wan_tpu.pricing import bundles, kernel_calls
from wan_tpu.pricing.bundles import Body
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


CountBundles = Callable[[KernelCall, str, int], StepBundles]


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
            count: Counts the bundles of a call on a host's chip, given the grid steps of a core.
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
        """Return the bundles of one grid step. What several threads ask for at once is counted once."""
        file = self._folder / f"kernel-{self._hardware.name}-{key.digest(f'{call.digest} {_describe_counter()}')}.json"
        with _counting.setdefault(file, threading.Lock()):
            return self._bundles(call, file)

    def _bundles(self, call: KernelCall, file: Path) -> StepBundles:
        try:
            return StepBundles(**json.loads(file.read_text())["bundles"])
        except (FileNotFoundError, KeyError, TypeError, ValueError):  # Never counted, or the disk was full.
            count = self._count(call, self._hardware.host_topology, call.steps_a_core(self._cores))
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")  # Others may count it, too.
        try:
            part.write_text(json.dumps({"kernel": call.name, "grid": call.grid, "bundles": asdict(count)}))
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
        return count


@functools.cache
def _describe_counter() -> str:
    """Identify the counter: the compiler, and the code that reads its output."""
    code = [Path(file).read_text() for file in (bundles.__file__, kernel_calls.__file__, __file__)]
    return key.digest(repr([installed_version("libtpu"), *code]))


def count_alone(call: KernelCall, host: str, steps: int) -> StepBundles:
    """Compile a call alone for a chip of a host, whose core runs `steps` grid steps, and return the bundles of one.

    These are the hot region and the bundles around it in the grid's loop. If the hot region is the body of a loop, it
    counts once per iteration, although its code exists only once; several loops in a step count as often as each runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "call.json"
        call.save(path)
        counts = bundles.count_bundles(f"{kernel_calls.__file__}:load_saved", {"path": str(path)}, host)
    # Beside the call, the program may copy its operands to where the kernel has them.
    kernel = max(counts, key=lambda kernel: (kernel.name.startswith(kernel_calls.ALONE), kernel.hot.bundles))
    if call.loops > 1:
        return step_bundles(kernel.loops, steps)
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
