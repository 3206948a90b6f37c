"""The options --timeout and --attempts, which change `actors.reliability.ReliabilitySettings`."""

import argparse
import dataclasses
import math
from collections.abc import Iterable

from actors.reliability import ReliabilitySettings
from cluster.gang.protocol import Timeouts
from wan_tpu.commands.parser import OptionGroup
from wan_tpu.errors import InvalidInput
from wan_tpu.suggest import did_you_mean

# Suffixes of the fields that --timeout and --attempts change, respectively.
_SECONDS_SUFFIX, _COUNT_SUFFIX = "_s", "_attempts"


def add_timeouts(group: OptionGroup) -> None:
    """Add --timeout, for the time-outs of slices only."""
    group.add_argument(
        "--timeout",
        action="append",
        default=[],
        metavar="NAME=SECONDS",
        help="change a time limit of slices, such as join=1200; docs/cluster.md lists the names",
    )


def add_reliability(group: OptionGroup) -> None:
    """Add --timeout and --attempts, for all fields of `ReliabilitySettings`."""
    for name, metavar, text in (
        ("timeout", "NAME=SECONDS", "change a time limit, such as join=1200"),
        ("attempts", "NAME=COUNT", "change how often something is tried before it counts as failed, such as stage=8"),
    ):
        group.add_argument(
            f"--{name}", action="append", default=[], metavar=metavar, help=f"{text}; docs/pipeline.md lists the names"
        )


def read_timeouts(args: argparse.Namespace) -> Timeouts:
    """Return the time-outs of slices, as changed by --timeout; raises `InvalidInput`."""
    return Timeouts(**_read_seconds(args.timeout, list_names(Timeouts, _SECONDS_SUFFIX)))


def read_reliability(args: argparse.Namespace) -> ReliabilitySettings:
    """Return all time-outs and retries, as changed by --timeout and --attempts; raises `InvalidInput`."""
    seconds = _read_seconds(args.timeout, list_names(ReliabilitySettings, _SECONDS_SUFFIX))
    counts = _read_counts(args.attempts, list_names(ReliabilitySettings, _COUNT_SUFFIX))
    settings = ReliabilitySettings(**seconds, **counts)  # type: ignore[arg-type]  # The suffixes determine the types.
    for period, limit in (("renewal", "lease"), ("check_in", "absent")):
        period_s, limit_s = (getattr(settings, name + _SECONDS_SUFFIX) for name in (period, limit))
        if limit_s < 2 * period_s:
            raise InvalidInput(
                f"--timeout {limit}={limit_s:g} and {period}={period_s:g}: {limit} must be at least twice {period}, or "
                "a working process would be considered lost"
            )
    return settings


def list_names(kind: type[Timeouts], suffix: str) -> list[str]:
    """Return the names that an option accepts: the fields of a class whose names have a suffix, without that suffix."""
    return [field.name.removesuffix(suffix) for field in dataclasses.fields(kind) if field.name.endswith(suffix)]


def _read_seconds(texts: Iterable[str], names: list[str]) -> dict[str, float]:
    changed = {}
    for text in texts:
        name, number = _split("--timeout", "time-out", text, names)
        try:
            seconds = float(number)
        except ValueError:
            raise InvalidInput(f"--timeout {text}: give a number of seconds, such as {name}=1200") from None
        if not 0 < seconds < math.inf:
            raise InvalidInput(f"--timeout {text}: give a number of seconds above 0, such as {name}=1200")
        changed[name + _SECONDS_SUFFIX] = seconds
    return changed


def _read_counts(texts: Iterable[str], names: list[str]) -> dict[str, int]:
    changed = {}
    for text in texts:
        name, number = _split("--attempts", "count of attempts", text, names)
        if not number.isdecimal() or int(number) < 1:
            raise InvalidInput(f"--attempts {text}: give a whole number of at least 1, such as {name}=8")
        changed[name + _COUNT_SUFFIX] = int(number)
    return changed


def _split(option: str, kind: str, text: str, names: list[str]) -> tuple[str, str]:
    name, _, number = text.partition("=")
    if name not in names:
        hint = did_you_mean(name, names)
        raise InvalidInput(f"{option} {text}: there is no {kind} {name!r}{hint}; choose from {', '.join(names)}")
    return name, number
