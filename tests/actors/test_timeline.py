"""The figures of a timeline, by hand; the trace as a viewer reads it; the picture as pixels."""

import dataclasses
import io
import itertools
import json

import numpy as np
import pytest
from PIL import Image

from actors.observe.span import Span
from actors.observe.timeline import assign_letters, build_trace, compute_figures, count_computing, list_tracks
from actors.observe.timeline_picture import draw

START = 1_790_000_000.0


def span(slice_, request, kind, start, end, **more):
    stage = more.pop("stage", "denoise_high")
    pool = more.pop("pool", slice_.partition("/")[0])
    times = {"start_s": START + start, "seconds": end - start}
    return Span(slice=slice_, request=request, stage=stage, kind=kind, pool=pool, **times, **more)


SPANS = [
    span("encoder/0", "cat-1", "load", 0, 1),
    span("encoder/0", "cat-1", "compute", 1, 2),
    span("encoder/0", "cat-2", "compute", 2, 3),
    span("high/0", "cat-1", "fetch", 2, 2.5),
    span("high/0", "cat-1", "compute", 2.5, 4, step=1),
    span("high/0", "cat-1", "compute", 4, 6, step=2),
    span("high/0", "cat-2", "fetch", 3, 3.5),
    span("high/0", "cat-2", "fetch", 3.25, 3.6),
    span("high/0", "cat-2", "compute", 6, 8),
    span("low/0", "cat-1", "compute", 6, 10),
]


def test_figures_are_those_computed_by_hand():
    figures = compute_figures(SPANS)
    assert figures.wall_s == pytest.approx(10)
    assert figures.busy == pytest.approx({"encoder/0": 0.2, "high/0": 0.55, "low/0": 0.4})
    assert figures.overlap == pytest.approx((0.5 + 2) / 10)  # 2.5 to 3 and 6 to 8
    assert sum(seconds for seconds, _ in count_computing(SPANS)) == pytest.approx(10)
    assert figures.chips == "real"


def test_timeline_without_spans_is_empty():
    assert compute_figures([]).wall_s == 0
    assert json.loads(build_trace([]))["traceEvents"] == []
    with pytest.raises(ValueError, match="spans"):
        draw([])


def test_figures_say_what_is_not_real():
    emulated = [dataclasses.replace(each, chips="emulated") for each in SPANS]
    assert "emulated" in compute_figures(emulated).summarize()
    mixed = [*emulated, dataclasses.replace(SPANS[0], chips="simulated")]
    assert "simulated" in compute_figures(mixed).summarize()
    assert json.loads(build_trace(mixed))["otherData"]["chips"] == "simulated"
    assert "simulated" not in compute_figures(SPANS).summarize()


def test_tracks_and_letters_follow_the_order_of_work():
    spans = [span(f"high/{i}", "b", "compute", 1, 2) for i in (9, 8)] + [span("encoder/0", "a", "compute", 0, 1)]
    assert [name for _, name in list_tracks(spans)] == ["encoder/0", "high/8", "high/9"]
    many = [span("high/0", f"r{i}", "compute", i, i + 1) for i in range(28)]
    assert list(assign_letters(many).values())[::27] == ["A", "AB"]


def test_trace_opens_in_viewers():
    """What viewers need: complete events in microseconds, named processes and threads, nothing overlapping in one."""
    overlapping = [*SPANS, span("high/0", "cat-3", "compute", 7, 9)]
    trace = json.loads(build_trace(overlapping))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    pools = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert list(pools.values()) == ["encoder", "high", "low"]
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(overlapping)
    threads = {}
    for event in events:
        assert event["dur"] > 0
        assert 0 <= event["ts"] <= 10e6
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert sorted(names[key] for key in threads) == sorted(
        ["encoder/0", "high/0", "high/0 2", "high/0 transfers", "high/0 transfers 2", "low/0"]
    )
    for times in threads.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(times)):
            assert end <= start + 0.2  # microseconds: rounding
    step = next(event for event in events if event["args"].get("step") == 2)
    assert step["name"] == "A cat-1"
    assert step["args"] == {"request": "cat-1", "stage": "denoise_high", "what": "compute", "step": 2}


def test_trace_says_why_the_slice_was_chosen():
    chosen = "0 calls, others 2 to 3; holds the program"
    spans = [span("high/0", "cat-1", "fetch", 0, 1, chosen=chosen), span("high/0", "cat-1", "compute", 1, 2)]
    events = [event for event in json.loads(build_trace(spans))["traceEvents"] if event["ph"] == "X"]
    assert [event["args"].get("chosen") for event in events] == [None, chosen]


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def area(image, colour):
    return int((np.abs(image.astype(int) - colour).max(axis=-1) < 8).sum())


def test_picture_shows_each_request_in_its_colour():
    image = pixels(draw(SPANS))
    assert (image[[0, 0, -1, -1], [0, -1, 0, -1]] == 255).all()  # a light background
    first, second = area(image, (0x44, 0x77, 0xAA)), area(image, (0xEE, 0x77, 0x33))
    assert first / second == pytest.approx(8.5 / 3, rel=0.15)  # seconds of computing; letters and edges are white
    assert image.shape[1] > 1400
    more = pixels(draw([*SPANS, span("decoder/0", "cat-1", "compute", 10, 11)]))
    assert more.shape[0] > image.shape[0]  # a track more


def test_picture_says_emulated():
    note = (0xAA, 0x33, 0x77)
    assert area(pixels(draw(SPANS)), note) == 0
    assert area(pixels(draw([dataclasses.replace(each, chips="emulated") for each in SPANS])), note) > 100
