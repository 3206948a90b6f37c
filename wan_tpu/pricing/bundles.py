"""Count the instructions of TPU kernels by compiling them for a chip that is only described, not present.

A TPU TensorCore is statically scheduled: it issues one bundle of instructions a cycle, so the bundles of a kernel's
inner region predict its time when nothing stalls. libtpu contains the whole compiler. A child process compiles a
function and has the compiler write its final bundles to a folder; this module reads them.

Needs libtpu. The child runs this file by its path and imports nothing of the package, so that it starts quickly.
"""

import dataclasses
import functools
import glob
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = str(Path(__file__).parents[2])
_BUNDLE = re.compile(r"^\s*0x[0-9a-f]+\s+(\w+)?:\s*(>*)", re.MULTILINE)  # Its label, and a ">" for each loop around it.
_CALL = re.compile(r"%([\w.-]+) = [^\n]* custom-call\([^\n]*op_name=\"([^\"]*)")  # Its name, and where it is called.
_PRODUCT = " vmatmul"  # The instruction of the matrix units on every chip.
# Unless passes are selected, all of them write their text, which takes 2.5 times the compile time and 200 MB per
# kernel.
PASSES = "final_bundles|final_hlo-static-per-bundle-utilization"


class Body(NamedTuple):
    """Bundles that run one after the other; `idle` are those before the first matrix product and after the last."""

    bundles: int
    idle: int


@dataclasses.dataclass(frozen=True)
class KernelBundles:
    """The schedule of one kernel, in bundles."""

    name: str
    scope: str  # Where the function calls it: JAX's names of the scopes around the call, and of the call.
    total: int
    # The region with the most bundles of its own: the body of the kernel's main loop, or of its main grid step.
    hot: Body
    around: int  # The bundles of the enclosing loops that run whenever it does, to advance to the next grid step.
    slot_bound: int  # The most instructions that any issue slot must take, by its capacity: no schedule is shorter.
    slots: Mapping[str, float]  # The share of each slot's capacity that is used.
    # Bodies by the iterations of the loops around them, outermost first. The grid's loop, where it has several steps,
    # runs two more to fetch the first tiles and to store the last.
    loops: Mapping[tuple[int, ...], Body]


class CompileError(RuntimeError):
    """The compiler refused the kernel, usually for a lack of VMEM; the message is the compiler's."""


def count_bundles(
    target: str, options: Mapping[str, object] | None = None, host: str = "v6e:2x2", timeout_s: float = 600
) -> list[KernelBundles]:
    """Compile `target` for a chip of a host and count the bundles of each kernel in it, largest first.

    Args:
        target: "path/of/file.py:function". The function is called with `options` and returns a function and its
            arguments as `jax.ShapeDtypeStruct`s. The file is run by its path, so that its package is not imported.
        options: JSON values.
        host: The compiler's name of a host's chips.

    Raises:
        CompileError: The compiler refuses the kernel, or the host is unknown.
        Unavailable: It takes longer than `timeout_s`.
    """
    from wan_tpu.chip_files import COMPILES_ONLY  # Not in the child, which needs none of the package.
    from wan_tpu.errors import Unavailable

    with tempfile.TemporaryDirectory(prefix="bundles-") as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={PASSES}"
        path = os.pathsep.join(p for p in (ROOT, os.environ.get("PYTHONPATH")) if p)
        settings = {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags, "PYTHONPATH": path}
        environment = os.environ | COMPILES_ONLY | settings
        command = [sys.executable, "-P", __file__, host, target, json.dumps(dict(options or {}))]
        try:
            child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise Unavailable(
                f"counting {target.rpartition(':')[2]} for {host} took longer than {timeout_s:.0f} s, because this "
                "machine is busy; run it again when a core is free (finished counts are kept)"
            ) from None
        if child.returncode:
            raise CompileError(_find_cause(child.stderr))
        return _read(Path(folder), json.loads(child.stdout.splitlines()[-1]))


def _read(folder: Path, scopes: Mapping[str, str]) -> list[KernelBundles]:
    kernels = []
    for file in folder.glob("*-final_bundles.txt"):
        match = re.fullmatch(r"(\d+-(.+))-\d+-final_bundles\.txt", file.name)
        if not match or "<" in match[2] or match[2] == "TLP" or "schedule-analysis" in match[2]:
            continue  # This is the program around the kernels.
        [use] = folder.glob(f"{glob.escape(match[1])}-*-final_hlo-static-per-bundle-utilization.txt")
        text = file.read_text(errors="replace")
        regions, bundles = read_regions(text)
        slots, bound = read_slot_use(use.read_text())
        hot, around = find_hot_bundles(regions, bundles)
        scope = scopes.get(match[2], "")
        kernels.append(KernelBundles(match[2], scope, len(bundles), hot, around, bound, slots, read_loops(text)))
    return sorted(kernels, key=lambda kernel: -kernel.total)


@dataclasses.dataclass(frozen=True)
class Region:
    """The bundles under one `pl.when` or in one loop (its body counted once): from `start` on, `end` excluded."""

    start: int
    end: int

    @property
    def bundles(self) -> int:
        """The number of bundles, including those of nested regions."""
        return self.end - self.start

    def holds(self, other: "Region") -> bool:
        """Whether another is nested in it."""
        return self != other and self.start <= other.start and other.end <= self.end


class Bundle(NamedTuple):
    """One bundle of a final_bundles file, which may take several lines."""

    label: str | None
    depth: int  # The number of loops around it.
    text: str

    @property
    def multiplies(self) -> bool:
        """Whether it starts a matrix product."""
        return _PRODUCT in self.text


def _parse_bundles(text: str) -> Iterator[Bundle]:
    begins = list(_BUNDLE.finditer(text))
    for match, end in zip(begins, [*(after.start() for after in begins[1:]), len(text)], strict=True):
        yield Bundle(match[1], len(match[2]), text[match.start() : end])


def read_regions(text: str) -> tuple[list[Region], list[Bundle]]:
    """Return the regions of a final_bundles file by their start, and all its bundles.

    Regions that begin at the same bundle are listed in any order. A few bundles that wait begin a region that never
    ends, which is ignored.
    """
    starts: dict[str, int] = {}
    regions: set[Region] = set()
    bundles = list(_parse_bundles(text))
    head = _BUNDLE.split(text, maxsplit=1)[0]
    for index, part in enumerate([head, *(bundle.text for bundle in bundles)]):
        for event, number in re.findall(r"(Start|End) region (\d+)", part):
            if event == "Start":
                starts[number] = index
            elif number in starts:
                regions.add(Region(starts.pop(number), index))
    nonempty = (region for region in regions if region.bundles)
    return sorted(nonempty, key=lambda region: (region.start, -region.end)), bundles


def read_loops(text: str) -> dict[tuple[int, ...], Body]:
    """Return the bodies of a final_bundles file by the iterations of the loops around them, outermost first.

    A loop whose number of iterations isn't a constant of the program counts as running once.
    """
    trips = {
        name: int(n) for name, n in re.findall(r"scmp\.ge\.s32\S* (?:\(%\w+\), )?%(s\w+), (\d+) /\* loop exit", text)
    }
    bodies: dict[tuple[int, ...], list[Bundle]] = {}
    around: list[int] = []
    for bundle in _parse_bundles(text):
        if bundle.label == "LB":
            counters = re.findall(r"= sphi [^;]*?%\w+, %(s\w+)", bundle.text)
            around = [*around[: bundle.depth - 1], next((trips[name] for name in counters if name in trips), 1)]
        bodies.setdefault(tuple(around[: bundle.depth]), []).append(bundle)
    return {trips: _make_body(bundles) for trips, bundles in bodies.items()}


def _make_body(bundles: list[Bundle]) -> Body:
    products = [index for index, bundle in enumerate(bundles) if bundle.multiplies]
    return Body(len(bundles), len(bundles) - (products[-1] + 1 - products[0] if products else 0))


def find_hot_bundles(regions: list[Region], bundles: list[Bundle]) -> tuple[Body, int]:
    """Return the region with the most bundles of its own, and how many of the loops around it always run with it.

    If nearly all of a region is its own, all of it counts, because a few bundles of bounds checks and waits form
    regions, too. A region that contains a loop doesn't qualify, but the loop may.
    """
    candidates: dict[Region, list[Bundle]] = {}
    for region in regions:
        whole = bundles[region.start : region.end]
        outside = _list_outside(region, [inner for inner in regions if region.holds(inner)], bundles)
        if 10 * (len(whole) - len(outside)) <= len(whole):
            candidates[region] = whole
        elif len({bundle.depth for bundle in whole} - {0}) <= 1:
            candidates[region] = outside
    if not candidates:
        return _make_body(bundles), 0
    hot = max(candidates, key=lambda region: len(candidates[region]))
    elsewhere = [region for region in regions if not region.holds(hot)]
    around = _list_outside(Region(0, len(bundles)), elsewhere, bundles)
    return _make_body(candidates[hot]), sum(bundle.depth > 0 for bundle in around)


def _list_outside(region: Region, excluded: list[Region], bundles: list[Bundle]) -> list[Bundle]:
    """Return the bundles of a region that are in none of the excluded regions, which are ordered by their start."""
    outside: list[Bundle] = []
    end = region.start
    for other in excluded:
        outside += bundles[end : max(end, other.start)]
        end = max(end, other.end)
    return outside + bundles[end : region.end]


def read_slot_use(text: str) -> tuple[dict[str, float], int]:
    """Return the used share of each issue slot and the bound they set, from a per-bundle-utilization file."""
    lines = text.splitlines()
    names = [name.strip() for name in lines[1].split(",")]
    capacity = [int(number) for number in lines[2].split()]
    rows = [[int(number) for number in line.split()] for line in lines[4:] if line.strip()]
    needed = [sum(column) / c for column, c in zip(zip(*rows, strict=True), capacity, strict=True)]
    return {name: round(n / len(rows), 3) for name, n in zip(names, needed, strict=True)}, round(max(needed))


def _find_cause(stderr: str) -> str:
    """Return the exception's own lines, which begin with its unindented name."""
    lines = stderr.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return "\n".join(lines[starts[-1] :] if starts else lines)[:2000]


def _compile(host: str, target: str, options: str) -> None:
    """Compile in this process: the child's side of `count_bundles`."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=host).devices
    mesh = jax.sharding.Mesh(np.array(devices[:1]), ("x",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    file, function = target.rsplit(":", 1)
    fn, shapes = runpy.run_path(file)[function](**json.loads(options))
    arguments = jax.tree.map(functools.partial(_on, replicated), shapes)
    with jax.set_mesh(mesh):  # Kernels see the described chip as theirs.
        hlo = jax.jit(fn).lower(*arguments).compile().as_text() or ""
    print(json.dumps(dict(_CALL.findall(hlo))))


def _on(sharding, shape):  # type: ignore[no-untyped-def]  # JAX is imported in the child only.
    return type(shape)(shape.shape, shape.dtype, sharding=sharding)


if __name__ == "__main__":
    _compile(*sys.argv[1:])
