"""Compare every kernel with its plain reference on this machine's first device."""

import dataclasses
from collections.abc import Iterator

from actors.doctor.finding import Finding, Machine
from wan_tpu.ops import self_check


def check_kernels(machine: Machine) -> Iterator[Finding]:
    """Yield the difference of each kernel from its reference; kernels are interpreted where there is no TPU."""
    for result in self_check.check_kernels(interpret=machine.is_rehearsal):
        yield Finding(
            result.name,
            f"off by {result.off:.1e}",
            "ok" if result.is_right else "fail",
            f"at most {result.tolerance:.1e}",
            "" if result.is_right else _advise(result.kernel),
            dataclasses.asdict(result),
        )


def _advise(kernel: str) -> str:
    return f"videos would be wrong: attach this report to an issue, and use --kernels reference:{kernel} meanwhile"
