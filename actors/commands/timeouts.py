"""The option --timeout: how long each phase of a slice's start, and each sign of life, may take."""

import argparse
import dataclasses
import math

from cluster.gang.protocol import Timeouts
from wan_tpu.errors import InvalidInput
from wan_tpu.suggest import did_you_mean


def add_timeouts(group: argparse._ActionsContainer) -> None:
    """Add the option for the time-outs of slices."""
    group.add_argument(
        "--timeout",
        action="append",
        default=[],
        metavar="NAME=SECONDS",
        help="how long a slice may take, such as join=1200: docs/cluster.md",
    )


def read_timeouts(args: argparse.Namespace) -> Timeouts:
    """Return the time-outs of slices, some of them changed by --timeout; raises `InvalidInput`."""
    names = [field.name.removesuffix("_s") for field in dataclasses.fields(Timeouts)]
    changed = {}
    for text in args.timeout:
        name, _, number = text.partition("=")
        if name not in names:
            hint = did_you_mean(name, names)
            raise InvalidInput(f"--timeout {text}: there is no time-out {name!r}{hint}; there are {', '.join(names)}")
        try:
            changed[f"{name}_s"] = float(number)
        except ValueError:
            raise InvalidInput(f"--timeout {text}: give seconds, such as {name}=1200") from None
        if not 0 < changed[f"{name}_s"] < math.inf:
            raise InvalidInput(f"--timeout {text}: give seconds above 0")
    return Timeouts(**changed)
