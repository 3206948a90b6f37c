"""The driver: what it makes, keeps, refuses and survives, in a folder and in gs://."""

import json
import re
import signal
import subprocess
import sys

import pytest

from actors.batch.lines import RESULTS
from actors.batch.manifest import read_manifest
from actors.batch.results import Provenance, settle
from actors.batch.run import open_batch
from tests.actors.engines import Engine, mp4
from tests.actors.small_spec import SPEC
from tests.conftest import ROOT
from tests.waiting import SECONDS, wait_for
from wan_tpu.storage.base import StorageError
from wan_tpu.storage.opening import open_storage


@pytest.fixture
def batch(storage, tmp_path):
    """Runs lines as a manifest; returns the report."""

    def run(*lines, engine=None, tell=None, output=storage, **settings):
        path = tmp_path / "requests.jsonl"
        path.write_text(
            "\n".join(line if isinstance(line, str) else json.dumps({"prompt": ""} | line) for line in lines)
        )
        manifest = read_manifest(path, SPEC)
        with open_batch(manifest, output, **settings, tell=tell or (lambda _: None)) as opened:
            return opened.run(engine or Engine())

    return run


def lines_of(storage):
    return [json.loads(line) for line in storage.read(RESULTS).splitlines()]


CAT, DOG, FOX = (
    {"id": name, "output": f"clips/{name}.mp4", "seed": seed} for seed, name in enumerate(("cat", "dog", "fox"))
)


def test_all_lines_are_made_once(batch, storage):
    report = batch(CAT, DOG, FOX)
    assert (report.exit_code, report.videos_made) == (0, 3)
    assert [name for name in storage.list() if name.endswith(".mp4")] == [
        f"clips/{name}.mp4" for name in ("cat", "dog", "fox")
    ]
    assert storage.read("clips/cat.mp4") == mp4()
    lines = lines_of(storage)
    assert [line["id"] for line in lines] == ["cat", "dog", "fox"]
    assert lines[0]["output"] == storage.location("clips/cat.mp4")
    assert lines[0]["status"] == "done"
    assert lines[0]["size_bytes"] == len(mp4())
    assert lines[0]["seconds"] > 0
    assert json.loads(storage.read("clips/cat.json")) == lines[0]

    again = Engine()
    report = batch(CAT, DOG, FOX, engine=again)
    assert (report.exit_code, report.videos_made, again.began) == (0, 0, [])
    assert "3 done before" in report.summarize()
    assert lines_of(storage) == lines


def test_only_what_is_missing_is_made(batch, storage):
    batch(CAT, DOG, FOX)
    storage.delete("clips/cat.mp4")  # A record without its video.
    storage.delete("clips/fox.json")  # A video without its record belongs to somebody else.
    storage.write("clips/dog.mp4", mp4()[:-1])  # Differs from what was written.
    engine, messages = Engine(), []
    report = batch(CAT, DOG, FOX, engine=engine, tell=messages.append)
    assert sorted(engine.began) == ["cat", "dog"]
    assert (report.exit_code, report.videos_made) == (1, 2)
    assert storage.read("clips/dog.mp4") == mp4()
    assert re.search(r"fox: .*clips/fox.mp4 exists, but has no record of a batch", *messages)


def test_other_files_are_never_written_over(batch, storage):
    storage.write("clips/cat.json", b'{"my": "notes"}')
    storage.write("clips/dog.mp4", b"my film")
    report = batch(CAT, DOG, FOX, remake_changed=True)
    assert (report.videos_made, report.count("failed")) == (1, 2)
    assert storage.read("clips/cat.json") == b'{"my": "notes"}'
    assert storage.read("clips/dog.mp4") == b"my film"


def test_changed_lines_are_kept_and_said(batch, storage):
    batch(CAT, DOG)
    changed, messages = CAT | {"seed": 7, "prompt": "5000"}, []
    report = batch(changed, DOG, tell=messages.append)
    assert (report.exit_code, report.videos_made) == (1, 0)
    assert "1 changed" in report.summarize()
    assert re.search(
        r"^cat: line 1 has another request than .*clips/cat.mp4 was made from.*give it a new id", *messages
    )
    assert [line["status"] for line in lines_of(storage)] == ["changed", "done"]
    report = batch(changed, DOG, remake_changed=True)
    assert (report.exit_code, report.videos_made) == (0, 1)
    assert storage.read("clips/cat.mp4") == mp4(5000)


def test_bad_lines_do_not_stop_the_rest(batch, storage):
    messages = []
    report = batch(CAT, {"id": "bad", "steps": 0}, "no json", DOG, tell=messages.append)
    assert (report.exit_code, report.videos_made) == (1, 2)
    assert messages[0] == "bad: line 2 steps is 0; allowed: 1 to 1000, nearest 1"
    assert messages[1].startswith("line 3 isn't valid JSON")
    assert [(line["line"], line["status"]) for line in lines_of(storage)] == [
        (1, "done"),
        (2, "invalid"),
        (3, "invalid"),
        (4, "done"),
    ]


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("poison", "ValueError: the model ... choked on it"),
        ("cancelled", "RuntimeError: the engine cancelled it, and nobody else did"),
        ("no mp4", "ValueError: the engine returned 9 bytes that aren't an mp4"),
    ],
)
def test_a_failed_request_is_alone_and_made_again(batch, storage, prompt, error):
    messages = []
    report = batch(CAT, DOG | {"prompt": prompt}, FOX, tell=messages.append, in_flight=1)
    assert (report.exit_code, report.videos_made) == (1, 2)
    assert messages == [f"dog: {error}"]
    assert [line["status"] for line in lines_of(storage)] == ["done", "failed", "done"]
    assert "clips/dog.mp4" not in storage.list()
    engine = Engine()
    assert batch(CAT, DOG, FOX, engine=engine).exit_code == 0
    assert engine.began == ["dog"]


def test_warnings_are_told_and_noted(batch, storage):
    messages = []
    assert batch(CAT | {"prompt": "cut"}, DOG, tell=messages.append).exit_code == 0
    assert messages == ["cat: the prompt was cut"]
    assert [line["warnings"] for line in lines_of(storage)] == [["the prompt was cut"], []]
    assert batch(CAT | {"prompt": "cut"}, DOG).exit_code == 0
    assert lines_of(storage)[0]["warnings"] == ["the prompt was cut"]  # As its record says.


def test_records_are_read_once_and_no_engine_is_needed_for_nothing(emulator, gcs, tmp_path):
    """Whether there is anything to do is known before anything that makes videos is up."""
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps({"prompt": ""} | CAT))
    with open_batch(read_manifest(path, SPEC), gcs) as opened:
        assert [entry.id for entry in opened.todo] == ["cat"]
        assert opened.run(Engine()).videos_made == 1
    emulator.seen.clear()
    with open_batch(read_manifest(path, SPEC), gcs) as opened:
        assert not opened.todo
        assert opened.run(None).summarize().startswith("1 requests: 0 made, 1 done before")
    assert sum("clips%2Fcat.json" in line and line.startswith("GET") for line in emulator.seen) == 1


def test_in_flight_is_bounded(batch):
    engine = Engine(0.05)
    assert batch(*({"id": f"r{i}"} for i in range(12)), engine=engine, in_flight=3).exit_code == 0
    assert engine.most == 3


def test_only_records_that_are_there_are_read(gcs, emulator, tmp_path):
    """A thousand new lines cost one listing, not a thousand questions."""
    gcs.write("cat.json", b"{}")
    lines = tmp_path / "requests.jsonl"
    lines.write_text("\n".join(json.dumps({"id": name, "prompt": ""}) for name in ("cat", *map(str, range(50)))))
    emulator.seen.clear()
    entries = read_manifest(lines, SPEC).entries
    settled = [result for _, result in settle(gcs, entries, provenance=Provenance(), remake_changed=False)]
    assert settled.count(None) == 50
    assert settled[0].error is not None
    requests = [line for line in emulator.seen if "/o" in line]  # The client also looks at the bucket now and then.
    assert len(requests) == 2, requests  # The listing, and cat.json.


def test_an_output_that_cannot_be_written_is_said_before_any_work(batch, tmp_path):
    (tmp_path / "file").write_text("")
    engine = Engine()
    for output in (tmp_path / "file" / "out", "gs://no-such-bucket/run"):
        with pytest.raises(StorageError):
            batch(CAT, engine=engine, output=open_storage(output))
    assert engine.began == []


# ---- in a process of its own


def start(tmp_path, output, *, seconds, lines, more=(), through=()):
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": ""} | line) for line in lines))
    command = [sys.executable, "-m", "tests.actors.batch_worker", str(path), str(output), str(seconds), *more]
    command = [*through, *command]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("folder", signal.SIGINT),
        ("folder", signal.SIGKILL),
        pytest.param("gs", signal.SIGKILL, marks=pytest.mark.thorough),
    ],
)
def test_stopped_drivers_are_resumed(tmp_path, request, kind, number):
    stop_and_resume(tmp_path, request, kind, number)


@pytest.mark.long
@pytest.mark.parametrize("how", ["--ignore-signal=INT", pytest.param("--block-signal=INT", marks=pytest.mark.thorough)])
def test_a_job_of_rays_and_one_in_a_shells_background_end_at_sigterm(tmp_path, request, how):
    stop_and_resume(tmp_path, request, "folder", signal.SIGTERM, through=["env", how])


def stop_and_resume(tmp_path, request, kind, number, through=()):
    storage = open_storage(tmp_path / "out") if kind == "folder" else request.getfixturevalue("gcs")
    lines = [{"id": f"r{i:02}", "prompt": "300000"} for i in range(30)]  # It is stopped long before all are made.
    first = start(tmp_path, storage.location(), seconds=0.4, lines=lines, through=through)
    try:
        wait_for(lambda: len(list_videos(storage)) > 1, "two videos")
        first.send_signal(number)
        _, errors = first.communicate(timeout=SECONDS)
    finally:
        first.kill()
        first.wait()
    before = list_videos(storage)
    assert 2 <= len(before) < 30
    if number == signal.SIGKILL:
        assert first.returncode == -9
    else:
        assert first.returncode == (143 if number == signal.SIGTERM else 130)
        assert errors.splitlines()[-1] == "interrupted"
        assert {line["id"] for line in lines_of(storage)} == set(before)

    second = start(tmp_path, storage.location(), seconds=0, lines=lines)
    out, errors = second.communicate(timeout=SECONDS)
    assert second.returncode == 0, errors
    assert out.startswith(f"30 requests: {30 - len(before)} made, {len(before)} done before")
    assert list_videos(storage) == [line["id"] for line in lines]
    assert [line["status"] for line in lines_of(storage)] == ["done"] * 30
    if kind == "folder":
        left = {path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")}
        assert left == {".wan-tpu.lock"}


def list_videos(storage):
    """Ids whose record says done; each has its whole video."""
    records = [json.loads(storage.read(name)) for name in storage.list() if name.endswith(".json")]
    done = [record for record in records if record["status"] == "done"]
    sizes = storage.list()
    assert all(sizes[f"{record['id']}.mp4"] == record["size_bytes"] == 300_000 for record in done)
    return sorted(record["id"] for record in done)


def test_a_disk_that_gets_full_fails_what_does_not_fit(tmp_path):
    """A tmpfs of 1 MB: the large one fails with the reason, its neighbours are made; it is tried again next time."""
    sizes = {"a": 200_000, "large": 2_000_000, "b": 200_000, "c": 200_000}
    (tmp_path / "out").mkdir()
    lines = [{"id": name, "prompt": str(size)} for name, size in sizes.items()]
    worker = start(tmp_path, tmp_path / "out", seconds=0, lines=lines, more=["small-disk"])
    out, errors = worker.communicate(timeout=SECONDS)
    if worker.returncode == 77:
        pytest.skip(errors)
    _, a, large, b, c, files = out.splitlines()
    assert (a, b, c) == ("a done ", "b done ", "c done ")
    assert re.match(r"large failed can't write .*out/large.mp4 \(No space left on device\); free some space", large)
    assert "partial" not in files
    assert "'large.mp4'" not in files
    assert worker.returncode == 1
    assert "error: 4 requests: 3 made, 1 failed" in errors


def test_a_full_disk_costs_no_more_work(tmp_path):
    """Once nothing fits, requests fail at once instead of computing for nothing."""
    (tmp_path / "out").mkdir()
    lines = [{"id": f"r{i}", "prompt": "260000"} for i in range(10)]
    worker = start(tmp_path, tmp_path / "out", seconds=0, lines=lines, more=["small-disk"])
    out, errors = worker.communicate(timeout=SECONDS)
    if worker.returncode == 77:
        pytest.skip(errors)
    statuses = [line.split()[1] for line in out.splitlines()[1:-1]]
    assert statuses.count("done") == 3  # As many as fit, whichever came first.
    assert statuses.count("failed") == 7
    assert worker.returncode == 1
