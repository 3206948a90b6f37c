"""`wan-tpu doctor`: check a machine, or a slice, before a checkpoint is fetched."""

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from actors.commands.timeouts import add_timeouts, read_timeouts
from actors.doctor.examination import PARTS, Part, examine, list_problems, sort_parts, write_bundle
from actors.doctor.finding import Finding, Machine, merge
from cluster.emulation.cluster import find_default_folder
from cluster.gang.devices import list_device_files
from cluster.slice_spec import SliceSpec
from wan_tpu.commands.parser import Parser
from wan_tpu.errors import OutputError

_MARKS = {"ok": "ok  ", "info": "    ", "warn": "warn", "fail": "FAIL"}
PART_S = 900.0  # All hosts of a slice together may take this long for a part.
_NAME, _LEFT = 30, 7  # Width of a name, and of the margin left of it.


def doctor(argv: Sequence[str]) -> int:
    """Check this machine's chips, kernels, network and disk, and say what to do about what is wrong.

    No checkpoint is needed. Without a TPU, CPU devices stand in for chips: the same checks, at small sizes.
    """
    args = _parse(argv)
    if not args.output.absolute().parent.is_dir():
        raise OutputError(f"{args.output.absolute().parent} is no folder; make it, or give another --output")
    parts = sort_parts(args.part or list(PARTS))
    machine, hosts = _examine_slice(args, parts) if args.slice else _examine_here(args, parts)
    write_bundle(args.output, machine, hosts)
    wrong = [finding for host in hosts for finding in list_problems(host)]
    failed = sum(finding.verdict == "fail" for finding in wrong)
    seconds = sum(part.seconds for part in hosts[0])
    says = f"{failed} to mend, {len(wrong) - failed} to look at" if wrong else "nothing wrong was found"
    if machine.is_rehearsal and machine.devices:
        says += "; CPU devices stood in for chips, so this says little of a TPU"
    print(f"\n{says}. {seconds:.0f} s; the report is {args.output}")
    return 1 if failed else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="wan-tpu doctor", description=doctor.__doc__)
    parser.add_argument(
        "--part", action="append", choices=list(PARTS), help=f"only this part ({', '.join(PARTS)}); several times"
    )
    parser.add_argument("--folder", help="on the disk that weights go to; default the current one, of hosts /tmp")
    parser.add_argument(
        "--output", type=Path, default=Path("doctor.json"), help="the report to attach to an issue; default %(default)s"
    )
    group = parser.add_argument_group("a slice of a Ray cluster, in place of this machine")
    group.add_argument("--slice", type=SliceSpec, help="such as v6e-16: a free one is taken, and all its hosts checked")
    group.add_argument(
        "--address", help='of the cluster\'s GCS, "host:port"; default: the emulated one of this machine'
    )
    group.add_argument(
        "--state", type=Path, default=find_default_folder(), help="of the emulated cluster's state; default %(default)s"
    )
    add_timeouts(group)
    return parser.parse_args(argv)


def _examine_here(args: argparse.Namespace, parts: Sequence[str]) -> tuple[Machine, list[list[Part]]]:
    folder = Path(args.folder or ".")
    if not folder.is_dir():
        raise OutputError(f"{folder} is no folder; make it, or give another one")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # Of a model that is written within a second.
    scratch = Path(tempfile.mkdtemp(prefix=".wan-tpu-doctor-", dir=folder))
    machine = Machine(scratch, is_rehearsal=not list_device_files())
    try:
        return machine, [examine(machine, parts, _Printer().print)]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _examine_slice(args: argparse.Namespace, parts: Sequence[str]) -> tuple[Machine, list[list[Part]]]:
    from actors.commands.arguments import find_gcs_address
    from cluster.connect import connect, leave
    from cluster.errors import SliceError
    from cluster.gang.slice import take

    args.folder, of_hosts = args.state, args.folder
    connect(find_gcs_address(args))
    printer = _Printer()
    try:
        host, limits = "actors.doctor.on_slice:DoctorHost", read_timeouts(args)
        with take(args.slice, host, of_hosts, name="doctor", timeouts=limits, tell=print) as slice_:
            print(slice_.describe())
            hosts: list[list[Part]] = [[] for _ in slice_.hosts]
            machine = Machine(Path(), is_slice=True)
            for name in parts:
                try:
                    answers = slice_.gather("check", name, machine.calibration, timeout_s=PART_S)
                except SliceError as error:  # Where one host stops, the others wait for it in the next exchange.
                    loss = Finding(name, str(error), "fail", "an answer of each host", "look at that host's log")
                    printer.print(name, loss)
                    hosts[0].append(Part(name, PARTS[name][2], (loss,), PART_S))
                    return machine, hosts
                machine = merge([host for _, host in answers])
                for place, (part, _), done in zip(slice_.hosts, answers, hosts, strict=True):
                    done.append(part)
                    for finding in part.findings:
                        if place is slice_.hosts[0] or finding.verdict in ("warn", "fail"):
                            printer.print(name, finding, "" if place is slice_.hosts[0] else f"on {place}: ")
            slice_.call("end")
            return machine, hosts
    finally:
        leave()


class _Printer:
    """Prints findings as they come, under the headings of their parts."""

    def __init__(self) -> None:
        self._part = ""

    def print(self, part: str, finding: Finding, where: str = "") -> None:
        """Print a finding."""
        if part != self._part:
            self._part = part
            print(f"\n{PARTS[part][2]}")
        expected = f"  (expected: {finding.expected})" if finding.expected and finding.verdict != "ok" else ""
        print(f"  {_MARKS[finding.verdict]} {finding.name:<{_NAME}} {where}{finding.measured}{expected}", flush=True)
        if finding.advice:
            print(f"{'':{_LEFT}}-> {finding.advice}", flush=True)
