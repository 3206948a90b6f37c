"""Measure what a pipeline on an emulated cluster holds in memory, process by process, and whether that grows."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import ray
from matplotlib.figure import Figure

from cluster.emulation.ray_nodes import processes

MIB = 2**20
ROLES = {  # how Ray's processes call themselves
    "ServeReplica": "replicas",
    "HostActor": "hosts",
    "_StatusActor": "status",
    "_RefStoreActor": "references",
    "ServeController": "Serve controller",
    "raylet": "raylets",
    "gcs_server": "GCS",
}


@dataclass(frozen=True)
class Sample:
    """What was held after `done` requests.

    private_mib  memory that a process shares with nobody, the most among the processes of a role
    store_mib    of all nodes' object stores: objects that live
    """

    done: int
    private_mib: dict[str, float]
    store_mib: float


def sample(folder: Path, done: int) -> Sample:
    """Measure this process, the driver, and the emulated cluster with the given temporary folder."""
    private_mib = {"driver": _private_mib(psutil.Process())}
    for process in processes(folder):
        try:
            title = " ".join(process.cmdline()[:1]) + " " + process.name()
            role = next((role for key, role in ROLES.items() if key in title), None)
            if role is not None:
                private_mib[role] = max(private_mib.get(role, 0.0), _private_mib(process))
        except (psutil.NoSuchProcess, OSError, StopIteration):  # gone meanwhile
            continue
    return Sample(done, private_mib, store_mib())


def store_mib() -> float:
    """Return the size of all nodes' object stores, as last reported by their raylets (about every 0.1 s)."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return (total.get("object_store_memory", 0) - free.get("object_store_memory", 0)) / MIB


def growth(samples: Sequence[Sample], warm: int) -> dict[str, float]:
    """Return the growth in MiB between the first and the second half of what came after `warm` requests, medians.

    Also of "object store". Needs four samples after the warm-up.
    """
    after = [sample for sample in samples if sample.done >= warm]
    if len(after) < 4:
        raise ValueError(f"{len(after)} samples after {warm} requests say nothing; take at least four")
    first, second = after[: len(after) // 2], after[len(after) // 2 :]

    def median(some: Sequence[Sample], role: str) -> float:
        return float(
            np.median([sample.store_mib if role == "object store" else sample.private_mib[role] for sample in some])
        )

    return {role: median(second, role) - median(first, role) for role in [*after[0].private_mib, "object store"]}


def draw(samples: Sequence[Sample], title: str) -> bytes:
    """Return a picture of all samples as PNG bytes: a line a role, with the band that its values stay in."""
    figure = Figure(figsize=(11, 5.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    done = [sample.done for sample in samples]
    lines = {role: [sample.private_mib.get(role, np.nan) for sample in samples] for role in samples[0].private_mib}
    lines["object store"] = [sample.store_mib for sample in samples]
    for role, mib in sorted(lines.items(), key=lambda line: -np.nanmax(line[1])):
        [line] = axes.plot(
            done, mib, linewidth=1.5, marker=".", label=f"{role}: {mib[0]:.0f} at first, {mib[-1]:.0f} at last"
        )
        axes.axhspan(np.nanmin(mib), np.nanmax(mib), color=line.get_color(), alpha=0.08, linewidth=0)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    axes.set(xlabel="requests done", ylabel="MiB that a process shares with nobody")
    axes.set_ylim(0)
    figure.legend(fontsize=9, loc="outside right upper", title="largest process of a role", frameon=False)
    axes.grid(alpha=0.3)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _private_mib(process: psutil.Process) -> float:
    """Return a process's memory without what is mapped from files and the object store."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:")) / 1024
