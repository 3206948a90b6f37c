"""Draw spans as a PNG: a track for each slice and a colour for each request, to see the overlap at a glance."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from actors.observe.span import Span
from actors.observe.timeline import (
    NOTES,
    assign_letters,
    build_trace,
    compute_figures,
    count_computing,
    find_bounds,
    list_tracks,
    merge_compute,
)
from wan_tpu.storage.base import Storage

# Tol's "bright" and "vibrant" schemes, which colour-blind people can distinguish, too: https://sronpersonalpages.nl/~pault/
_COLOURS = ("#4477AA", "#EE7733", "#228833", "#AA3377", "#CCBB44", "#009988", "#EE6677", "#33BBEE", "#882255")
_OVERHEAD = {"load": ("#D9D9D9", "////"), "compile": ("#EDEDED", "....")}
_TALL, _THIN = 0.56, 0.13  # Heights within a track: of computing, and of the strip below it for transfers.


def draw(spans: Sequence[Span], title: str = "When each slice computes") -> bytes:
    """Return the picture as PNG bytes; raise `ValueError` when there is nothing to draw."""
    if not spans:
        raise ValueError("there are no spans to draw")
    slices = list_tracks(spans)
    height = 2.6 + 0.62 * len(slices)
    figure = Figure(figsize=(12, height), dpi=130, facecolor="white", layout="constrained")
    upper, lower = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [max(0.62 * len(slices), 0.9), 0.75], "hspace": 0.04}
    )
    letters = assign_letters(spans)
    colours = {request: _COLOURS[i % len(_COLOURS)] for i, request in enumerate(letters)}
    start, end = find_bounds(spans)
    wall = max(end - start, 1e-6)
    figures = compute_figures(spans)
    _draw_tracks(upper, spans, letters, colours, wall)
    _name_tracks(upper, slices, figures.busy, wall)
    _draw_count(lower, spans, slices)
    figure.suptitle(
        f"{title}  ·  {figures.summarize().splitlines()[0]}", x=0.01, ha="left", fontsize=12, fontweight="bold"
    )
    _draw_legend(figure, spans, letters, colours)
    if figures.chips != "real":
        note = NOTES[figures.chips]
        lower.annotate(note, (1, -0.62), xycoords="axes fraction", ha="right", va="top", fontsize=9, color="#AA3377")
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def save(output: Storage, spans: Sequence[Span], title: str = "When each slice computes") -> None:
    """Write timeline.png, and timeline.trace.json for Perfetto, to a storage; raises `StorageError`."""
    output.write("timeline.png", draw(spans, title))
    output.write("timeline.trace.json", build_trace(spans))


def _draw_tracks(
    axes: Axes, spans: Sequence[Span], letters: dict[str, str], colours: dict[str, str], wall: float
) -> None:
    start = find_bounds(spans)[0]
    for i, (pool, slice_) in enumerate(list_tracks(spans)):
        mine = [span for span in spans if (span.pool, span.slice) == (pool, slice_)]
        if i % 2 == 0:
            axes.axhspan(i - 0.5, i + 0.5, color="#F6F6F6", zorder=0)
        for span in mine:
            middle, height = (i + 0.36, _THIN) if span.kind == "fetch" else (i - 0.08, _TALL)
            axes.barh(middle, span.seconds, left=span.start_s - start, height=height, **_style_bar(span, colours, wall))
        for first, last, request in merge_compute(mine, slice_, wall / 100, by_request=True):
            if last - first > wall / 60:
                axes.text(
                    (first + last) / 2 - start, i - 0.08, letters[request], ha="center", va="center",
                    color="white", fontsize=9, fontweight="bold", zorder=4,
                )  # fmt: skip


def _style_bar(span: Span, colours: dict[str, str], wall: float) -> dict[str, Any]:
    if span.kind in _OVERHEAD:
        colour, hatch = _OVERHEAD[span.kind]
        return {"facecolor": colour, "hatch": hatch, "edgecolor": "#8C8C8C", "linewidth": 0, "zorder": 2}
    stepwise = span.step is not None and span.seconds > wall / 400
    edge = {"edgecolor": "white", "linewidth": 0.5} if stepwise else {"linewidth": 0}
    return {"facecolor": colours[span.request], "zorder": 3, **edge}


def _name_tracks(axes: Axes, slices: list[tuple[str, str]], busy: dict[str, float], wall: float) -> None:
    names = [slice_ if not pool or pool in slice_ else f"{pool}\n{slice_}" for pool, slice_ in slices]
    axes.set_yticks(range(len(slices)), names, fontsize=9.5)
    axes.set_ylim(len(slices) - 0.5, -0.5)
    axes.set_xlim(0, wall)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=False, length=0)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6, zorder=1)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for i, (_, slice_) in enumerate(slices):
        axes.annotate(
            f"computes\n{busy[slice_]:.0%}", (1.008, i), xycoords=("axes fraction", "data"),
            va="center", fontsize=8.5, color="#444444",
        )  # fmt: skip


def _draw_count(axes: Axes, spans: Sequence[Span], slices: list[tuple[str, str]]) -> None:
    """Draw how many slices compute at a time: overlap is what rises above one."""
    times, counts = [0.0], []
    for seconds, count in count_computing(spans):
        times.append(times[-1] + seconds)
        counts.append(count)
    axes.stairs(counts, times, fill=True, color="#9DB7D5", zorder=2)
    axes.axhline(1, color="#666666", linewidth=0.8, linestyle=":", zorder=3)
    axes.set_ylim(0, len(slices) + 0.2)
    axes.set_yticks(sorted({0, 1, len(slices)}))
    axes.set_ylabel("slices that\ncompute", fontsize=8.5, rotation=0, ha="right", va="center")
    axes.set_xlabel("seconds", fontsize=9.5)
    axes.tick_params(labelsize=9)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6, zorder=1)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_legend(figure: Figure, spans: Sequence[Span], letters: dict[str, str], colours: dict[str, str]) -> None:
    entries = list(letters)[: len(_COLOURS)]
    handles = [Patch(facecolor=colours[name], label=f"{letters[name]}  {_shorten(name)}") for name in entries]
    if len(letters) > len(entries):
        handles.append(Patch(facecolor="none", label=f"and {len(letters) - len(entries)} more (colours repeat)"))
    kinds = {span.kind for span in spans}
    if "fetch" in kinds:
        handles.append(Patch(facecolor="#777777", label="thin: in or out, beside other work"))
    for kind, (colour, hatch) in _OVERHEAD.items():
        if kind in kinds:
            label = {"load": "reads weights", "compile": "compiles"}[kind]
            handles.append(Patch(facecolor=colour, edgecolor="#8C8C8C", hatch=hatch, linewidth=0, label=label))
    figure.legend(handles=handles, loc="outside lower left", ncols=min(len(handles), 5), frameon=False, fontsize=9)


def _shorten(name: str) -> str:
    return name if len(name) <= 28 else name[:27] + "…"
