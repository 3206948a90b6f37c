"""JAX's start: which devices it has, and whether they are what their names say."""

import importlib.util
import os
import time
from collections.abc import Iterator

from actors.doctor.finding import Finding, Machine
from cluster.chips import CHIPS, GIB
from cluster.gang.devices import classify_start_failure, list_device_files
from cluster.gang.machine_place import read_machine_place

REHEARSED = 4  # CPU devices that stand in for chips.


class NoDevices(Exception):
    """JAX has no device, so that nothing else can be checked."""


def check_start(machine: Machine) -> Iterator[Finding]:
    """Yield findings about JAX's devices; raises `NoDevices`."""
    hosts = len(read_machine_place().hosts)
    if hosts > 1 and not machine.is_slice:
        yield Finding(
            "slice",
            f"this is one of {hosts} hosts of a TPU slice",
            "fail",
            "a slice of one host",
            "JAX would wait for the others: start a Ray cluster on all of them (docs/tpu-vm.md, docs/gke.md), and run "
            "wan-tpu doctor --slice KIND on it",
        )
        raise NoDevices("a single worker of a larger slice can't start alone")
    start = time.perf_counter()
    import jax

    if machine.is_rehearsal and not machine.is_slice:
        jax.config.update("jax_num_cpu_devices", REHEARSED)
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise NoDevices(str(classify_start_failure("this machine", error))) from None
    seconds = time.perf_counter() - start
    first = devices[0]
    if first.platform == "cpu" and list_device_files() and "cpu" not in os.environ.get("JAX_PLATFORMS", ""):
        reason = "another process has the chips, or libtpu is older than they are"
        if importlib.util.find_spec("libtpu") is None:
            reason = "libtpu isn't installed: pip install '.[tpu]'"
        raise NoDevices(f"this machine has a TPU ({list_device_files()[0]}), but JAX finds only its CPU; {reason}")
    machine.kind, machine.devices = first.device_kind, len(devices)
    machine.is_rehearsal = first.platform == "cpu"
    yield Finding("start", f"{seconds:.1f} s", figures={"seconds": seconds})
    if jax.process_count() > 1:
        yield _compare_with_metadata(jax.process_index(), jax.process_count())
    yield _describe(machine)
    if first.platform == "tpu":
        yield Finding("platform", first.client.platform_version.replace("\n", ", "))
        for device in devices:
            where = f"process {device.process_index}, at {tuple(device.coords)}, core {device.core_on_chip}"
            yield Finding(f"device {device.id}", where)
        yield _check_memory(machine, first.memory_stats() or {})


def _compare_with_metadata(process: int, count: int) -> Finding:
    """Report this host's position in its slice. JAX usually numbers hosts in another order than their worker ids."""
    worker = read_machine_place().worker_id
    where = f"process {process} of {count}"
    if worker is None:
        return Finding("place", where)
    fine = worker < count
    advice = "" if fine else "its node joined the nodes of another slice: compare their labels ray.io/tpu-slice-name"
    return Finding("place", f"{where}, worker {worker}", "ok" if fine else "fail", f"a worker below {count}", advice)


def _describe(machine: Machine) -> Finding:
    measured = f"{machine.devices} of {machine.kind!r}"
    if machine.is_rehearsal:
        return Finding("devices", f"{measured}: they stand in for chips, and their timings say nothing about a TPU's")
    if machine.chip is None:
        advice = "the following is measured, but there are no published figures to compare it with"
        return Finding("devices", measured, "warn", f"a TPU: {', '.join(CHIPS)}", advice)
    return Finding("devices", f"{measured}: TPU {machine.chip.name}", "ok")


def _check_memory(machine: Machine, stats: dict[str, int]) -> Finding:
    limit = stats.get("bytes_limit", 0)
    figures = {name: int(value) for name, value in stats.items()}
    if machine.chip is None:
        return Finding("memory of a device", f"{limit / GIB:.2f} GiB", figures=figures)
    expected = machine.chip.device_bytes
    fine = limit >= 0.98 * expected
    return Finding(
        "memory of a device",
        f"{limit / GIB:.2f} GiB",
        "ok" if fine else "warn",
        f"{expected / GIB:.2f} GiB",
        "" if fine else "plans assume more: please report this in an issue",
        figures,
    )
