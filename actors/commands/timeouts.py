"""The options --timeout and --attempts, which change `actors.reliability.ReliabilitySettings`."""

import argparse
import dataclasses
import math
from collections.abc import Iterable

from actors.reliability import ReliabilitySettings
from cluster.gang.protocol import Timeouts
from wan_tpu.errors import InvalidInput
from wan_tpu.suggest import did_you_mean

_SECONDS, _COUNT = "_s", "_attempts"  # Endings of the names of the fields that --timeout and --attempts change.


def add_timeouts(group: argparse._ActionsContainer) -> None:
    """Add --timeout for the time-outs of slices alone."""
    group.add_argument(
        "--timeout",
        action="append",
        default=[],
        metavar="NAME=SECONDS",
        help="how long a slice may take, such as join=1200: docs/cluster.md",
    )


def add_reliability(group: argparse._ActionsContainer) -> None:
    """Add --timeout and --attempts for everything in `ReliabilitySettings`."""
    for name, metavar, text in (
        ("timeout", "NAME=SECONDS", "how long something may take, such as join=1200"),
        ("attempts", "NAME=COUNT", "how often something is tried before it has failed, such as stage=8"),
    ):
        group.add_argument(
            f"--{name}", action="append", default=[], metavar=metavar, help=f"{text}: docs/pipeline.md has all names"
        )


def read_timeouts(args: argparse.Namespace) -> Timeouts:
    """Return the time-outs of slices, some of them changed by --timeout; raises `InvalidInput`."""
    return Timeouts(**_read_seconds(args.timeout, list_names(Timeouts, _SECONDS)))


def read_reliability(args: argparse.Namespace) -> ReliabilitySettings:
    """Return all time-outs and retries, some of them changed by the options; raises `InvalidInput`."""
    seconds = _read_seconds(args.timeout, list_names(ReliabilitySettings, _SECONDS))
    counts = _read_counts(args.attempts, list_names(ReliabilitySettings, _COUNT))
    settings = ReliabilitySettings(**seconds, **counts)  # type: ignore[arg-type]  # Their names end by their types.
    for period, limit in (("renewal", "lease"), ("check_in", "absent")):
        period_s, limit_s = (getattr(settings, name + _SECONDS) for name in (period, limit))
        if limit_s < 2 * period_s:
            raise InvalidInput(
                f"--timeout {limit}={limit_s:g} and {period}={period_s:g}: {limit} must be at least twice {period}, or "
                "a process that works counts as gone"
            )
    return settings


def list_names(kind: type[Timeouts], ending: str) -> list[str]:
    """Return the names that an option takes: those of a class's fields with this ending, without it."""
    return [field.name.removesuffix(ending) for field in dataclasses.fields(kind) if field.name.endswith(ending)]


def _read_seconds(texts: Iterable[str], names: list[str]) -> dict[str, float]:
    changed = {}
    for text in texts:
        name, number = _split("--timeout", "time-out", text, names)
        try:
            seconds = float(number)
        except ValueError:
            raise InvalidInput(f"--timeout {text}: give seconds, such as {name}=1200") from None
        if not 0 < seconds < math.inf:
            raise InvalidInput(f"--timeout {text}: give seconds above 0")
        changed[name + _SECONDS] = seconds
    return changed


def _read_counts(texts: Iterable[str], names: list[str]) -> dict[str, int]:
    changed = {}
    for text in texts:
        name, number = _split("--attempts", "count of attempts", text, names)
        if not number.isdecimal() or int(number) < 1:
            raise InvalidInput(f"--attempts {text}: give a whole number of 1 and more, such as {name}=8")
        changed[name + _COUNT] = int(number)
    return changed


def _split(option: str, kind: str, text: str, names: list[str]) -> tuple[str, str]:
    name, _, number = text.partition("=")
    if name not in names:
        hint = did_you_mean(name, names)
        raise InvalidInput(f"{option} {text}: there is no {kind} {name!r}{hint}; there are {', '.join(names)}")
    return name, number
