"""Run all checks in order, and write the bundle that people attach to an issue."""

import dataclasses
import datetime
import functools
import importlib
import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from actors.doctor.finding import Finding, Machine
from actors.doctor.host import read_variables
from actors.doctor.jax_start import NoDevices
from wan_tpu.versions import list_versions

# By part: the module and function that check it, and its description. JAX starts in the second part.
PARTS = {
    "host": ("host", "check_host", "the machine"),
    "jax": ("jax_start", "check_start", "JAX and its devices"),
    "rates": ("rates", "check_rates", "what a device can do"),
    "collectives": ("collectives", "check_collectives", "what devices send each other"),
    "kernels": ("kernels", "check_kernels", "kernels against plain operations"),
    "model": ("small_model", "check_small_model", "a small model, from text to pixels"),
    "executables": ("executables", "check_executables", "programs that were compiled ahead of time"),
    "mp4": ("small_model", "check_mp4", "encoding"),
    "step": ("full_step", "check_step", "a full-size step, and what plans predict of it"),
}
_UNEXPECTED = "this check failed unexpectedly: attach the report to an issue"


@dataclasses.dataclass(frozen=True)
class Part:
    """A group of findings, and how long they took."""

    name: str
    about: str
    findings: tuple[Finding, ...]
    seconds: float


def examine(machine: Machine, parts: Sequence[str], on_finding: Callable[[str, Finding], object]) -> list[Part]:
    """Run checks, one part after the other; an exception becomes a finding.

    Args:
        machine: The machine to check; its fields are filled in on the way.
        parts: Some of `PARTS`. "jax" is run in any case where one of them needs devices.
        on_finding: Called with each finding, and its part's name, as soon as it is there.
    """
    done = []
    for name in sort_parts(parts):
        done.append(examine_part(name, machine, functools.partial(on_finding, name)))
        if name == "jax" and not machine.devices:
            break
    return done


def sort_parts(parts: Sequence[str]) -> list[str]:
    """Return parts in the order of `PARTS`, with JAX's start where one of them needs devices."""
    needs_jax = set(parts) - {"host", "jax", "mp4"}
    return [name for name in PARTS if name in parts or (name == "jax" and needs_jax)]


def examine_part(name: str, machine: Machine, on_finding: Callable[[Finding], object] = lambda finding: None) -> Part:
    """Run the checks of one part, as `examine` does."""
    start, findings = time.perf_counter(), list[Finding]()

    def add(finding: Finding) -> None:
        findings.append(finding)
        on_finding(finding)

    module, function, subject = PARTS[name]
    try:
        check = getattr(importlib.import_module(f"actors.doctor.{module}"), function)
        for finding in check(machine):
            add(finding)
    except NoDevices as error:
        add(Finding("start", str(error), "fail", "devices", "nothing else can be checked before JAX starts"))
    except Exception as error:
        figures = {"traceback": traceback.format_exc()}
        add(Finding(name, f"{type(error).__name__}: {error}", "fail", "", _UNEXPECTED, figures))
    return Part(name, subject, tuple(findings), time.perf_counter() - start)


def write_bundle(path: Path, machine: Machine, hosts: Sequence[Sequence[Part]]) -> None:
    """Write everything as JSON: versions, flags, findings with their figures. No secret and no prompt is in it.

    Args:
        machine: One of the hosts.
        hosts: The parts of each host.
    """
    bundle: dict[str, Any] = {
        "wan_tpu_doctor": 1,
        "versions": list_versions(),
        "environment": read_variables(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "devices": {
            "kind": machine.kind,
            "chip": "" if machine.chip is None else machine.chip.name,
            "count": machine.devices,
            "rehearsal": machine.is_rehearsal,
        },
        "calibration": machine.calibration.figures,
        "hosts": [[dataclasses.asdict(part) for part in parts] for parts in hosts],
    }
    path.write_text(json.dumps(bundle, indent=1))


def list_problems(parts: Sequence[Part]) -> Iterator[Finding]:
    """Yield the findings that report something wrong or slow."""
    return (finding for part in parts for finding in part.findings if finding.verdict in ("fail", "warn"))
