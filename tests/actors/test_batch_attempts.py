"""One request of a batch: when its snapshots may go, whatever it raises, and what runs beside the event loop."""

import asyncio
import json
import os
import signal
import threading
import time

import pytest

from actors.batch import run as running
from actors.batch.lines import RESULTS
from actors.batch.manifest import read_manifest
from actors.batch.previews import LinePreviews
from actors.batch.run import open_batch
from actors.batch.spans import LatestSpans
from actors.engine import PreviewPicture
from actors.errors import PipelineError, RequestFailed
from actors.observe.span import Span
from tests.actors.engines import Engine, FailingEngine
from tests.actors.small_spec import SPEC
from tests.waiting import wait_for
from wan_tpu.errors import InvalidRequest, Unavailable
from wan_tpu.storage.base import StorageError
from wan_tpu.storage.local import LocalStorage


def run(tmp_path, engine, output, *ids, in_flight=1, previews=False):
    """Run a manifest of requests with these ids; return the report."""
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps({"id": id_, "prompt": "", "seed": seed}) for seed, id_ in enumerate(ids)))
    settings = {"in_flight": in_flight, "previews": previews, "tell": lambda _: None}
    with open_batch(read_manifest(path, SPEC), output, **settings) as batch:
        return batch.run(engine)


class PaintingEngine(Engine):
    """Shows a picture of each unfinished video, and notes which files there are then."""

    def __init__(self, output):
        super().__init__()
        self.output, self.seen = output, []

    async def generate(self, plan, *, id, on_event, on_preview, **others):
        on_preview(PreviewPicture(1, b"picture"))
        while f"{id}.preview.jpg" not in self.output.list():
            await asyncio.sleep(0.01)
        self.seen.append(self.output.read(f"{id}.preview.jpg"))
        return await super().generate(plan, id=id, on_event=on_event, **others)


def test_preview_is_beside_an_unfinished_video_and_goes_when_that_is_there(tmp_path):
    output = LocalStorage(tmp_path / "out")
    engine = PaintingEngine(output)
    assert run(tmp_path, engine, output, "cat", "dog", previews=True).videos_made == 2
    assert engine.seen == [b"picture"] * 2
    assert list(output.list()) == ["cat.json", "cat.mp4", "dog.json", "dog.mp4", RESULTS]


def test_only_the_newest_picture_waits_for_slow_storage(tmp_path):
    written, may_go = [], threading.Event()

    class SlowStorage(LocalStorage):
        def write(self, name, content):
            written.append(content)
            assert may_go.wait(30)
            super().write(name, content)

    previews = LinePreviews(SlowStorage(tmp_path), "cat.preview.jpg")
    previews.add(PreviewPicture(1, b"1"))
    wait_for(lambda: written)
    for step in range(2, 9):
        previews.add(PreviewPicture(step, b"%d" % step))
    may_go.set()
    wait_for(lambda: written == [b"1", b"8"])
    previews.close()
    assert not list(tmp_path.glob("*.jpg"))


def test_what_a_killed_run_has_left_of_a_picture_is_removed(tmp_path):
    output = LocalStorage(tmp_path / "out")
    half = tmp_path / "out" / ".cat.preview.jpg.0123456789ab.partial"
    half.parent.mkdir()
    half.write_bytes(b"half")
    run(tmp_path, Engine(), output, "cat", previews=True)
    assert not half.exists()


@pytest.mark.parametrize(
    "error",
    [
        RequestFailed("it isn't for this model", "invalid"),
        RequestFailed("NaN", "unhealthy"),
        InvalidRequest("frames is 6"),
        ValueError("a mistake"),
    ],
)
def test_snapshots_of_a_final_failure_go_once_it_is_recorded(tmp_path, error):
    output = LocalStorage(tmp_path / "out")
    engine = FailingEngine(error)
    assert run(tmp_path, engine, output, "cat").count("failed") == 1
    assert engine.forgotten == ["cat"]


@pytest.mark.parametrize(
    "error",
    [
        RequestFailed("slices were lost", "lost"),
        PipelineError("there is no pipeline now"),
        Unavailable("the bucket doesn't answer"),
        asyncio.CancelledError(),
    ],
)
def test_snapshots_stay_where_another_run_may_go_on(tmp_path, error):
    engine = FailingEngine(error)
    assert run(tmp_path, engine, LocalStorage(tmp_path / "out"), "cat").count("failed") == 1
    assert engine.forgotten == []


@pytest.mark.parametrize("blocked", ["cat.mp4", "cat.json"])
def test_snapshots_stay_while_the_video_can_not_be_published(tmp_path, blocked):
    """A folder has the name of the video, or of the record, so that every write of that name fails."""
    (tmp_path / "out" / blocked).mkdir(parents=True)
    engine = Engine()
    report = run(tmp_path, engine, LocalStorage(tmp_path / "out"), "cat")
    assert (report.count("failed"), engine.began, engine.forgotten) == (1, ["cat"], [])
    (tmp_path / "out" / blocked).rmdir()
    assert run(tmp_path, engine, LocalStorage(tmp_path / "out"), "cat").videos_made == 1
    assert engine.forgotten == ["cat"]


def test_snapshots_stay_while_a_final_failure_can_not_be_recorded(tmp_path):
    (tmp_path / "out" / "cat.json").mkdir(parents=True)
    engine = FailingEngine(RequestFailed("NaN", "unhealthy"))
    assert run(tmp_path, engine, LocalStorage(tmp_path / "out"), "cat").count("failed") == 1
    assert engine.forgotten == []


class InterruptedStorage(LocalStorage):
    """Presses Ctrl-C while a video is being written."""

    def write(self, name, content):
        if name.endswith(".mp4"):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        super().write(name, content)


def test_interrupted_publishing_is_ended_and_its_snapshots_stay(tmp_path):
    engine, output = Engine(), InterruptedStorage(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, engine, output, "cat", "dog")
    assert (engine.began, engine.forgotten) == (["cat"], [])
    assert [json.loads(line)["status"] for line in output.read(RESULTS).splitlines()] == ["done"]


class OddError(BaseException):
    """An error that `except Exception` doesn't catch."""


@pytest.mark.parametrize(
    "error",
    [
        asyncio.CancelledError(),
        TimeoutError(),
        StopAsyncIteration(),
        OddError("odd"),
        BaseExceptionGroup("several", [OddError(), ValueError()]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_an_engine_raises_is_a_failed_line(tmp_path, error):
    output = LocalStorage(tmp_path / "out")
    report = run(tmp_path, FailingEngine(error), output, "cat", "dog", in_flight=2)
    assert (report.count("failed"), len(report.results), report.exit_code) == (2, 2, 1)
    assert [json.loads(line)["status"] for line in output.read(RESULTS).splitlines()] == ["failed", "failed"]


class StubbornEngine(Engine):
    """Makes another error of its cancellation."""

    async def generate(self, plan, *, id, on_event, priority=0, on_fragment=None, on_preview=None):
        self.began.append(id)
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(30)
        finally:
            raise ValueError("something else")


def test_an_interrupted_batch_ends_whatever_its_engine_makes_of_that(tmp_path):
    engine, output = StubbornEngine(), LocalStorage(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, engine, output, "cat", "dog")
    assert (engine.began, engine.forgotten, output.read(RESULTS)) == (["cat"], [], b"")


class TellingEngine(Engine):
    """Tells a span of every request."""

    async def generate(self, plan, *, id, on_event, priority=0, on_fragment=None, on_preview=None):
        on_event(Span(slice="s", request=id, stage="encoder", kind="compute", start_s=0.0, seconds=2.0))
        return await super().generate(plan, id=id, on_event=on_event)


def test_figures_that_fail_cost_no_video(tmp_path):
    path, output = tmp_path / "requests.jsonl", LocalStorage(tmp_path / "out")
    path.write_text(json.dumps({"id": "cat", "prompt": ""}))

    def fail(span):
        raise ValueError("counters can only go up")

    with open_batch(read_manifest(path, SPEC), output, tell=lambda _: None) as batch:
        report = batch.run(TellingEngine(), on_event=fail)
    assert report.exit_code == 0
    assert report.results[0].stage_s == {"encoder": 2.0}


@pytest.mark.parametrize("most", [4, 50])
def test_a_long_batch_keeps_its_latest_spans(tmp_path, most):
    spans, messages = LatestSpans(most), []
    for i in range(20):
        spans.add(Span(slice="s", request=f"r{i}", stage="encoder", kind="compute", start_s=i, seconds=1.0))
    assert len(spans) == min(most, 20)
    spans.save(LocalStorage(tmp_path), messages.append)
    trace = json.loads((tmp_path / "timeline.trace.json").read_text())
    requests = {event["args"]["request"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert requests == {f"r{i}" for i in range(20)[-most:]}
    assert messages == (["the timeline is of the last 4 spans of 20"] if most == 4 else [])


def test_a_timeline_that_can_not_be_written_is_told(tmp_path):
    (tmp_path / "timeline.png").mkdir()
    spans, messages = LatestSpans(), []
    spans.save(LocalStorage(tmp_path), messages.append)  # There is nothing to draw.
    spans.add(Span(slice="s", request="r", stage="encoder", kind="compute", start_s=0, seconds=1.0))
    spans.save(LocalStorage(tmp_path), messages.append)
    assert len(messages) == 1
    assert messages[0].startswith("the timeline can't be written: can't write")


# ---- what runs beside the event loop


class WatchedStorage(LocalStorage):
    """Refuses to be called where it would block an event loop; counts writes of results.jsonl, which take a while."""

    def __init__(self, folder, seconds=0.0):
        super().__init__(folder)
        self.seconds, self.results, self.at_once = seconds, [], 0

    def write(self, name, content):
        self.check()
        if name != RESULTS:
            super().write(name, content)
            return
        self.at_once += 1
        assert self.at_once == 1
        time.sleep(self.seconds)
        super().write(name, content)
        self.results.append((time.monotonic(), content.count(b"\n")))
        self.at_once -= 1

    def probe(self):
        self.check()
        super().probe()

    @staticmethod
    def check():
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()


def test_no_storage_is_called_on_the_event_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "RESULTS_S", 0.01)
    output = WatchedStorage(tmp_path / "out")
    report = run(tmp_path, Engine(0.02), output, *(f"r{i}" for i in range(12)), in_flight=2)
    assert report.exit_code == 0
    assert any(0 < count < 12 for _, count in output.results)  # Written while requests ended, however slow this is.
    assert output.results[-1][1] == 12


def test_slow_results_take_a_small_part_of_the_time(tmp_path, monkeypatch):
    """A write of 0.2 s is followed by four seconds without."""
    monkeypatch.setattr(running, "RESULTS_S", 0.001)
    output = WatchedStorage(tmp_path / "out", seconds=0.2)
    report = run(tmp_path, Engine(0.02), output, *(f"r{i}" for i in range(10)), in_flight=1)
    assert report.exit_code == 0
    assert len(output.results) == 3  # At the start, once while requests ended, and at the end.


def test_results_that_can_not_be_written_meanwhile_stop_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "RESULTS_S", 0.01)

    class Refusing(LocalStorage):
        def write(self, name, content):
            if name == RESULTS and threading.current_thread() is not threading.main_thread():
                raise StorageError("no room")
            super().write(name, content)

    assert run(tmp_path, Engine(0.03), Refusing(tmp_path / "out"), "cat", "dog").exit_code == 0
