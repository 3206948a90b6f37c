"""`wan-tpu doctor`: check a machine or a slice before downloading a checkpoint."""

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from actors.commands.arguments import GCS_ADDRESS_HELP, add_folder
from actors.commands.connection import find_gcs_address
from actors.commands.timeouts import add_timeouts, read_timeouts
from actors.doctor.examination import PARTS, Part, examine, list_problems, sort_parts, write_bundle
from actors.doctor.finding import Finding, Machine, merge
from cluster.gang.devices import list_device_files
from cluster.slice_spec import SliceSpec
from wan_tpu.commands.parser import Parser
from wan_tpu.errors import OutputError

_MARKS = {"ok": "ok  ", "info": "    ", "warn": "warn", "fail": "FAIL"}
PART_S = 900.0  # The time limit of one part on a slice, for all of its hosts together.
_NAME_WIDTH, _MARGIN_WIDTH = 30, 7  # Of a finding's name, and of the margin to the left of its advice, in characters.


def doctor(argv: Sequence[str]) -> int:
    """Check this machine's chips, kernels, network and disk, and say how to fix each problem.

    No checkpoint is needed. Without a TPU, the same checks run on CPU devices, at small sizes.
    """
    args = _parse(argv)
    _check_writable(args.output)
    parts = sort_parts(args.part or list(PARTS))
    machine, hosts = _examine_slice(args, parts) if args.slice else _examine_this_machine(args, parts)
    write_bundle(args.output, machine, hosts)
    problems = [finding for host in hosts for finding in list_problems(host)]
    failures = sum(finding.verdict == "fail" for finding in problems)
    seconds = sum(part.seconds for part in hosts[0])
    warnings = len(problems) - failures
    counts = f"{failures} failed, {warnings} warning{'' if warnings == 1 else 's'}"
    summary = counts if problems else "no problems found"
    if machine.is_rehearsal and machine.devices:
        summary += "; these checks ran on CPU devices, so they say little about a TPU"
    print(f"\n{summary}. {seconds:.0f} s; the report is {args.output}")
    return 1 if failures else 0


def _check_writable(report: Path) -> None:
    """Raise `OutputError` now, rather than after minutes of checks, if the report can't be written."""
    exists = report.exists()
    try:
        report.open("a").close()
    except OSError as error:
        raise OutputError(f"--output {report} can't be written ({error.strerror}); choose another file") from None
    if not exists:
        report.unlink()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="wan-tpu doctor", description=doctor.__doc__)
    parser.add_argument(
        "--part",
        action="append",
        choices=list(PARTS),
        help=f"check only this part ({', '.join(PARTS)}); repeat it for several parts",
    )
    parser.add_argument(
        "--disk",
        metavar="FOLDER",
        help="folder on the disk where weights will be stored; default: the current folder, or /tmp on the hosts of a "
        "slice",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("doctor.json"),
        help="file for the report, to attach to an issue; default %(default)s",
    )
    group = parser.add_group("a slice of a Ray cluster, in place of this machine")
    group.add_argument("--slice", help="kind of slice, such as v6e-16: check all hosts of a free slice of this kind")
    group.add_argument("--address", help=GCS_ADDRESS_HELP)
    add_folder(group)
    add_timeouts(group)
    args = parser.parse_args(argv)
    args.slice = None if args.slice is None else SliceSpec(args.slice)
    args.timeout = read_timeouts(args)
    return args


def _examine_this_machine(args: argparse.Namespace, parts: Sequence[str]) -> tuple[Machine, list[list[Part]]]:
    folder = Path(args.disk or ".")
    if not folder.is_dir():
        problem = "isn't a folder" if folder.exists() else "doesn't exist"
        raise OutputError(f"--disk {folder} {problem}; create it, or choose another folder")
    # The small model of the checks is written within a second, which needs no progress bar.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    scratch = Path(tempfile.mkdtemp(prefix=".wan-tpu-doctor-", dir=folder))
    machine = Machine(scratch, is_rehearsal=not list_device_files())
    try:
        return machine, [examine(machine, parts, _Printer().print)]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _examine_slice(args: argparse.Namespace, parts: Sequence[str]) -> tuple[Machine, list[list[Part]]]:
    from cluster.connect import connect, leave
    from cluster.errors import SliceError
    from cluster.gang.slice import take

    connect(find_gcs_address(args))
    printer = _Printer()
    try:
        host_class = "actors.doctor.on_slice:DoctorHost"
        with take(args.slice, host_class, args.disk, name="doctor", timeouts=args.timeout, on_status=print) as slice_:
            print(slice_.describe())
            hosts: list[list[Part]] = [[] for _ in slice_.hosts]
            machine = Machine(Path(), is_slice=True)
            for name in parts:
                try:
                    results = slice_.gather("check", name, machine.calibration, timeout_s=PART_S)
                except SliceError as error:
                    # Stop here: the other hosts would wait for the lost one in the next collective.
                    loss = Finding(name, str(error), "fail", "a result from each host", "look at that host's log")
                    printer.print(name, loss)
                    hosts[0].append(Part(name, PARTS[name][2], (loss,), PART_S))
                    return machine, hosts
                machine = merge([host for _, host in results])
                for place, (part, _), parts_of_host in zip(slice_.hosts, results, hosts, strict=True):
                    parts_of_host.append(part)
                    for finding in part.findings:
                        if place is slice_.hosts[0] or finding.verdict in ("warn", "fail"):
                            printer.print(name, finding, "" if place is slice_.hosts[0] else f"on {place}: ")
            slice_.call("end")
            return machine, hosts
    finally:
        leave()


class _Printer:
    """Prints findings as soon as they are known, below the description of their part."""

    def __init__(self) -> None:
        self._part = ""

    def print(self, part: str, finding: Finding, where: str = "") -> None:
        """Print a finding.

        Args:
            part: The name of its part.
            finding: The finding.
            where: The host, as a prefix such as "on HOST: ", or "".
        """
        if part != self._part:
            self._part = part
            print(f"\n{PARTS[part][2]}")
        expected = f"  (expected: {finding.expected})" if finding.expected and finding.verdict != "ok" else ""
        print(
            f"  {_MARKS[finding.verdict]} {finding.name:<{_NAME_WIDTH}} {where}{finding.measured}{expected}", flush=True
        )
        if finding.advice:
            print(f"{'':{_MARGIN_WIDTH}}-> {finding.advice}", flush=True)
