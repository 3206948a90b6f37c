"""Check the machine itself: its type, its resources, and which processes use its chips. JAX isn't imported."""

import os
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from actors.doctor.finding import Finding, Machine
from cluster.gang.devices import LOCKFILE, list_device_files, list_holders
from cluster.gang.machine_place import read_machine_place, read_metadata

HUGEPAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
STATUS = Path("/proc/self/status")
MIB, GIB = 2**20, 2**30
_IPC_LOCK = 14  # The number of the capability to lock memory without a limit (linux/capability.h).
_VARIABLES = ("TPU_", "LIBTPU_", "XLA_", "JAX_", "RAY_")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def check_host(machine: Machine) -> Iterator[Finding]:
    """Yield findings about machine, memory, devices and disk."""
    yield from _look_at_metadata()
    yield from _look_at_memory()
    yield from _look_at_devices()
    yield check_locked_memory(has_chips=bool(list_device_files()))
    yield from _look_at_variables()
    yield _write_to_disk(machine)


def read_variables() -> dict[str, str]:
    """Return the environment variables that decide what JAX, libtpu and Ray do; none that is a secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) and not any(word in name for word in _SECRET)
    }


def check_locked_memory(has_chips: bool) -> Finding:
    """Report how much memory this process may lock.

    libtpu maps host memory for the chips' transfers, which locks it. Linux refuses more than the limit (its log says
    "vfio_pin_pages_remote: RLIMIT_MEMLOCK exceeded") unless the process has the capability IPC_LOCK. Google's pages say
    that the limit must be raised in containers, and not which transfers fail under which limit.

    Args:
        has_chips: Whether this machine has chips. Without them no limit is too small.
    """
    name, expected = "locked memory (ulimit -l)", "all of the memory, or the capability IPC_LOCK"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    measured = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / MIB:.3g} MiB"
    figures = {"bytes": limit}
    if not has_chips:
        return Finding(name, measured, figures=figures)
    if _may_lock_memory():
        return Finding(name, f"{measured}, which IPC_LOCK lifts", "ok", expected, figures=figures)
    if limit == resource.RLIM_INFINITY or limit >= memory:
        return Finding(name, measured, "ok", expected, figures=figures)
    advice = (
        "transfers to the chips may fail late with ENOMEM, or hang. On a TPU VM: ulimit -l unlimited as root, "
        "LimitMEMLOCK=infinity in a systemd unit, docker run --ulimit memlock=-1. On GKE: docs/gke.md, Locked memory"
    )
    return Finding(name, measured, "warn", expected, advice, figures)


def check_lock_file(path: Path) -> Iterator[Finding]:
    """Yield a finding if libtpu's lock is left from another user, so that this one can neither take nor remove it."""
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        measured = f"{path} belongs to user {path.stat().st_uid}; user {os.getuid()} can't open it"
        advice = f"if no process of that user uses the chips, as root: rm {path}"
        yield Finding("libtpu's lock", measured, "fail", "none, or this user's", advice)


def _may_lock_memory() -> bool:
    """Return whether `IPC_LOCK` is effective for this process. Users other than root may have it without effect."""
    words = next(line for line in STATUS.read_text().splitlines() if line.startswith("CapEff:")).split()
    return bool(int(words[1], 16) >> _IPC_LOCK & 1)


def _look_at_metadata() -> Iterator[Finding]:
    machine = read_metadata("machine-type")
    if machine is None:
        yield Finding("machine", f"{os.cpu_count()} cores, not on Google Cloud")
        return
    kind = read_metadata("attributes/accelerator-type")
    names = [machine.rpartition("/")[2], *([kind] if kind else [])]
    yield Finding(
        "machine", f"{', '.join(names)}, {os.cpu_count()} cores", figures={"worker": read_machine_place().worker_id}
    )


def _look_at_memory() -> Iterator[Finding]:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding("memory", f"{pages / GIB:.0f} GiB")
    shared = shutil.disk_usage("/dev/shm").total
    enough = shared >= 0.3 * pages
    yield Finding(
        "shared memory (/dev/shm)",
        f"{shared / GIB:.1f} GiB",
        "ok" if enough else "warn",
        "30% of the memory, for Ray's object store",
        "" if enough else "start the container with --ipc host, or --shm-size",
    )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = files >= 65_536
    yield Finding(
        "open files",
        f"{files}",
        "ok" if enough else "warn",
        "65536 or more",
        "" if enough else "ulimit -n 1048576",
    )


def _look_at_devices() -> Iterator[Finding]:
    paths = list_device_files()
    if not paths:
        yield Finding("chips", "none: there is no /dev/vfio/N or /dev/accelN, or this container can't see it")
        return
    inaccessible = [path for path in paths if not os.access(path, os.R_OK | os.W_OK)]
    yield Finding(
        "chips",
        f"{', '.join(paths)}{f'; not for this user: {inaccessible[0]}' if inaccessible else ''}",
        "fail" if inaccessible else "ok",
        "to be read and written",
        "run the container with --privileged, or give the user the devices' group" if inaccessible else "",
    )
    busy = list_holders(map(os.path.realpath, [*paths, LOCKFILE]))
    for pid, path in busy.items():
        yield Finding("chips in use", f"process {pid} has {path}", "fail", "nobody's", f"end it: kill {pid}")
    if not busy:
        yield from check_lock_file(Path(LOCKFILE))
    if not HUGEPAGES.exists():
        return
    always = "[always]" in HUGEPAGES.read_text()
    yield Finding(
        "transparent hugepages",
        HUGEPAGES.read_text().strip(),
        "ok" if always else "warn",
        "[always]: libtpu starts and ends faster",
        "" if always else f"as root: echo always > {HUGEPAGES}",
    )


def _look_at_variables() -> Iterator[Finding]:
    for name, value in read_variables().items():
        if name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS", "JAX_PLATFORMS", "TPU_VISIBLE_CHIPS", "TPU_PROCESS_ADDRESSES"):
            yield Finding(name, value)


def _write_to_disk(machine: Machine) -> Finding:
    size, piece = (16 if machine.is_rehearsal else 1024) * MIB, os.urandom(MIB)
    file, start = machine.folder / "disk", time.perf_counter()
    free = shutil.disk_usage(machine.folder).free
    try:
        with file.open("wb") as stream:
            for _ in range(size // MIB):
                stream.write(piece)
            os.fsync(stream.fileno())
        rate = size / (time.perf_counter() - start)
    except OSError as error:
        measured = f"{error.strerror}; {free / GIB:.1f} GiB are free"
        advice = f"free some space on the disk of {machine.folder.parent}, or choose another folder with --disk"
        return Finding("disk", measured, "fail", "room for a checkpoint, up to 130 GB", advice)
    finally:
        file.unlink(missing_ok=True)
    measured = f"{rate / MIB:.0f} MiB/s written, {free / GIB:.0f} GiB free"
    return Finding("disk", measured, figures={"bytes_per_s": rate, "free_bytes": free})
