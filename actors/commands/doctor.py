"""`wan-tpu doctor`: check a machine before a checkpoint is fetched."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from actors.doctor.examination import PARTS, examine, problems, write_bundle
from actors.doctor.finding import Finding, Machine
from cluster.gang.devices import device_files
from wan_tpu.commands.parser import Parser
from wan_tpu.errors import OutputError

_MARKS = {"ok": "ok  ", "info": "    ", "warn": "warn", "fail": "FAIL"}
_NAME, _LEFT = 30, 7  # Columns of a name, and of what stands left of it.


def doctor(argv: Sequence[str]) -> int:
    """Check this machine's chips, kernels, network and disk, and say what to do about what is wrong.

    No checkpoint is needed. Without a TPU, CPU devices stand in for chips: the same checks, at small sizes.
    """
    parser = Parser(prog="wan-tpu doctor", description=doctor.__doc__)
    parser.add_argument(
        "--part", action="append", choices=list(PARTS), help=f"only this part ({', '.join(PARTS)}); several times"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="on the disk that weights go to; default the current one"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("doctor.json"), help="the report to attach to an issue; default %(default)s"
    )
    args = parser.parse_args(argv)
    for folder in (args.folder, args.output.absolute().parent):
        if not folder.is_dir():
            raise OutputError(f"{folder} is no folder; make it, or give another one")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # Of a model that is written within a second.
    scratch = Path(tempfile.mkdtemp(prefix=".wan-tpu-doctor-", dir=args.folder))
    machine = Machine(scratch, is_rehearsal=not device_files())
    try:
        parts = examine(machine, args.part or list(PARTS), _Printer().print)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    write_bundle(args.output, machine, parts)
    wrong = list(problems(parts))
    failed = sum(finding.verdict == "fail" for finding in wrong)
    seconds = sum(part.seconds for part in parts)
    says = f"{failed} to mend, {len(wrong) - failed} to look at" if wrong else "nothing wrong was found"
    if machine.is_rehearsal and machine.devices:
        says += "; CPU devices stood in for chips, so this says little of a TPU"
    print(f"\n{says}. {seconds:.0f} s; the report is {args.output}")
    return 1 if failed else 0


class _Printer:
    """Prints findings as they come, under the headings of their parts."""

    def __init__(self) -> None:
        self._part = ""

    def print(self, part: str, finding: Finding) -> None:
        """Print a finding."""
        if part != self._part:
            self._part = part
            print(f"\n{PARTS[part][2]}")
        expected = f"  (expected: {finding.expected})" if finding.expected and finding.verdict != "ok" else ""
        print(f"  {_MARKS[finding.verdict]} {finding.name:<{_NAME}} {finding.measured}{expected}", flush=True)
        if finding.advice:
            print(f"{'':{_LEFT}}-> {finding.advice}", flush=True)
