"""Timelines of what each slice did: figures of its spans, and a Chrome trace of them.

`actors.observe.timeline_picture` draws the same spans.
"""

import itertools
import json
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from actors.observe.span import Span
from actors.pipeline_spec import Chips

NOTES = {
    "emulated": "emulated: CPU devices stand in for chips; the seconds are this machine's",
    "simulated": "simulated: stages wait for planned durations instead of computing",
}


@dataclass(frozen=True)
class TimelineFigures:
    """Figures of a timeline."""

    wall_s: float  # Seconds from the start of the first span to the end of the last.
    busy: dict[str, float]  # For each slice, the share of that time in which it computes.
    overlap: float  # The share of that time in which at least two slices compute.
    chips: Chips  # "real" only when every span is.

    def summarize(self) -> str:
        lines = [f"{self.wall_s:.1f} s; two or more slices compute in {self.overlap:.0%} of it"]
        lines += [f"{name}: computes in {share:.0%}" for name, share in self.busy.items()]
        if self.chips != "real":
            lines.append(NOTES[self.chips])
        return "\n".join(lines)


def compute_figures(spans: Sequence[Span]) -> TimelineFigures:
    """Return the figures of spans; without any spans, all are zero."""
    if not spans:
        return TimelineFigures(0.0, {}, 0.0, "real")
    start, end = find_bounds(spans)
    wall = max(end - start, 1e-9)
    busy = {name: sum(b - a for a, b, _ in merge_compute(spans, name)) / wall for _, name in list_tracks(spans)}
    overlap = sum(seconds for seconds, count in count_computing(spans) if count >= 2) / wall
    return TimelineFigures(end - start, busy, overlap, find_chips(spans))


def count_computing(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """Return consecutive pieces of the time from first to last span: seconds, and how many slices compute in them."""
    start, end = find_bounds(spans)
    changes = [(start, 0), (end, 0)]
    for _, name in list_tracks(spans):
        for a, b, _ in merge_compute(spans, name):
            changes += [(a, 1), (b, -1)]
    pieces, count = [], 0
    for (time_s, change), (next_s, _) in itertools.pairwise(sorted(changes)):
        count += change
        if next_s > time_s:
            pieces.append((next_s - time_s, count))
    return pieces


def find_bounds(spans: Sequence[Span]) -> tuple[float, float]:
    """Return the first start and the last end, in seconds of `time.time()`."""
    return min(span.start_s for span in spans), max(span.end_s for span in spans)


def list_tracks(spans: Iterable[Span]) -> list[tuple[str, str]]:
    """Return all pairs of pool and slice: pools in the order in which work reaches them, slices of a pool by name."""
    ordered = sorted(spans, key=lambda span: (span.start_s, span.pool))
    pools = list(dict.fromkeys(span.pool for span in ordered))
    tracks = {(span.pool, span.slice) for span in ordered}
    return sorted(tracks, key=lambda track: (pools.index(track[0]), track[1]))


def assign_letters(spans: Iterable[Span]) -> dict[str, str]:
    """Return a letter for each request, in the order in which work on them began."""
    ordered = sorted(spans, key=lambda span: (span.start_s, span.request))
    letters = (
        "".join(pair) for size in itertools.count(1) for pair in itertools.product(string.ascii_uppercase, repeat=size)
    )
    return dict(zip(dict.fromkeys(span.request for span in ordered), letters, strict=False))


def find_chips(spans: Iterable[Span]) -> Chips:
    """Return "simulated" if any span is, else "emulated" if any is, else "real"."""
    kinds = {span.chips for span in spans}
    return "simulated" if "simulated" in kinds else "emulated" if "emulated" in kinds else "real"


def arrange_rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute spans over as few rows as it takes for none to overlap another."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        free = next((row for row in rows if row[-1].end_s <= span.start_s), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def build_trace(spans: Sequence[Span]) -> bytes:
    """Return JSON for Perfetto and chrome://tracing, with a process for each pool and a thread for each slice.

    Transfers during the computation have a thread of their own, "... transfers"; spans that overlap have more threads.
    A span's name begins with the letter of its request, since Perfetto colours by name and ignores digits.
    """
    start = find_bounds(spans)[0] if spans else 0.0
    letters = assign_letters(spans)
    pools = list(dict.fromkeys(pool for pool, _ in list_tracks(spans)))
    events: list[dict[str, Any]] = []
    for i, pool in enumerate(pools):
        events.append(_build_metadata("process_name", i + 1, name=pool or "slices"))
        events.append(_build_metadata("process_sort_index", i + 1, sort_index=i))
    tid = 0
    for pool, slice_ in list_tracks(spans):
        pid = pools.index(pool) + 1
        mine = [span for span in spans if (span.pool, span.slice) == (pool, slice_)]
        for beside, name in ((False, slice_), (True, f"{slice_} transfers")):
            for i, row in enumerate(arrange_rows([span for span in mine if (span.kind == "fetch") == beside])):
                tid += 1
                events.append(_build_metadata("thread_name", pid, tid, name=name if i == 0 else f"{name} {i + 1}"))
                events.append(_build_metadata("thread_sort_index", pid, tid, sort_index=tid))
                events += [_build_event(span, pid, tid, start, letters[span.request]) for span in row]
    chips = find_chips(spans)
    notes = {"chips": chips} | ({"note": NOTES[chips]} if chips != "real" else {})
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": notes | {"start_unix_s": round(start, 3)}}
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"


def _build_event(span: Span, pid: int, tid: int, start: float, letter: str) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{letter} {span.request if span.kind == 'compute' else span.kind}",
        "cat": span.kind,
        "pid": pid,
        "tid": tid,
        "ts": round((span.start_s - start) * 1e6, 1),
        "dur": round(span.seconds * 1e6, 1),
        "args": {"request": span.request, "stage": span.stage, "what": span.kind}
        | ({"step": span.step} if span.step is not None else {})
        | ({"chosen": span.chosen} if span.chosen else {}),
    }


def _build_metadata(kind: str, pid: int, tid: int = 0, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def merge_compute(
    spans: Iterable[Span], slice_: str, gap_s: float = 0.0, *, by_request: bool = False
) -> list[tuple[float, float, str]]:
    """Return when a slice computes, with spans merged that lie no further apart than `gap_s`.

    Args:
        gap_s: The longest gap that is closed.
        by_request: Merge only spans of the same request.

    Returns:
        Starts, ends, and requests, which are "" unless `by_request`.
    """
    merged: list[tuple[float, float, str]] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.slice != slice_ or span.kind != "compute":
            continue
        request = span.request if by_request else ""
        if merged and merged[-1][2] == request and span.start_s <= merged[-1][1] + gap_s:
            merged[-1] = merged[-1][0], max(merged[-1][1], span.end_s), request
        else:
            merged.append((span.start_s, span.end_s, request))
    return merged
