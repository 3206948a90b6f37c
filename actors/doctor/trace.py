"""Break the seconds of a program down by operation, from a trace of one call."""

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

OPERATIONS = "XLA Ops"  # The profiler's name for the row of a device's operations.


def trace_categories(call: Callable[[], Any]) -> dict[str, float]:
    """Return a device's seconds by category of operation, the longest first: the mean over this host's devices.

    On a TPU the categories are XLA's ("convolution fusion", "all-to-all", "custom-call"). The CPU's operations have
    none; their names without numbers stand in for it.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        events: list[Mapping[str, Any]] = []
        for file in Path(folder).rglob("*.trace.json.gz"):
            with gzip.open(file) as packed:
                events += json.load(packed)["traceEvents"]
    return sum_categories(events, jax.local_device_count())


def sum_categories(events: Sequence[Mapping[str, Any]], devices: int) -> dict[str, float]:
    """Return the seconds by category of a trace's events (in Chrome's format: durations in microseconds)."""
    rows = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    seconds: Counter[str] = Counter()
    for event in events:
        details = event.get("args", {})
        is_operation = rows.get((event.get("pid"), event.get("tid"))) == OPERATIONS or "hlo_op" in details
        if event.get("ph") == "X" and is_operation:
            category = details.get("hlo_category") or event["name"].partition(".")[0]
            seconds[category] += event["dur"] / 1e6 / devices
    return dict(seconds.most_common())
