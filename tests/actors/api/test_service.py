"""What OpenAI's client doesn't ask for: keys, idempotency, admission, ranges, events, ends of jobs, figures."""

import dataclasses
import json
import logging
import re
import threading
import time

import httpx
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from actors.api.keys import add_key, revoke_key
from actors.api.logs import JsonFormatter
from actors.jobs.database import Database
from actors.jobs.store import JobStore
from actors.jobs.values import Submission
from tests.actors.api import serving
from tests.actors.api.serving import served, wait_for, working
from tests.conftest import PHOTO, ROOT


@pytest.fixture
def http(service):
    with httpx.Client(base_url=service, timeout=30) as made:
        yield made


def create(http, headers=None, **fields):
    return http.post("/v1/videos", json={"prompt": "a cat", **fields}, headers=headers or {})


def done(http, job):
    return wait_for(lambda: (v := http.get(f"/v1/videos/{job}").json())["status"] in ("completed", "failed") and v)


def test_the_same_key_and_body_is_the_same_job(http):
    first = create(http, {"Idempotency-Key": "k1"}, seed=1)
    again = create(http, {"Idempotency-Key": "k1"}, seed=1)
    assert first.status_code == again.status_code == 200
    assert first.json()["id"] == again.json()["id"]
    other = create(http, {"Idempotency-Key": "k1"}, seed=2)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert create(http, {"Idempotency-Key": "k2"}, seed=1).json()["id"] != first.json()["id"]
    image = {"input_reference": ("cat.png", PHOTO.read_bytes())}
    one, two = (
        http.post("/v1/videos", data={"prompt": "x"}, files=image, headers={"Idempotency-Key": "k3"}) for _ in "ab"
    )
    assert one.json()["id"] == two.json()["id"]
    conflict = http.post("/v1/videos", files={"prompt": (None, "x")}, headers={"Idempotency-Key": "k3"})
    assert conflict.status_code == 409


def test_a_full_queue_says_when_to_come_back(settings):
    with served(dataclasses.replace(settings, queue_limit=2)) as address, httpx.Client(base_url=address) as http:
        assert [create(http).status_code for _ in range(3)] == [200, 200, 429]
        refused = create(http)
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 600


def test_what_doesn_t_fit_the_slices_is_refused_with_the_nearest_that_does(settings):
    small = dataclasses.replace(settings, largest=((480, 832, 81),))
    with served(small) as address, httpx.Client(base_url=address) as http:
        for size, frames, nearest in (
            ("832x480", 81, None),
            ("1280x720", 81, "832x464 with 81 frames"),
            ("832x480", 121, "832x480 with 81 frames"),
            ("480x832", 161, "480x832 with 81 frames"),
        ):
            answer = create(http, size=size, num_frames=frames)
            assert answer.status_code == (200 if nearest is None else 400)
            if nearest is not None:
                assert nearest in answer.json()["error"]["message"]
                wide, _, rest = nearest.partition(" with ")
                assert create(http, size=wide, num_frames=int(rest.split()[0])).status_code == 200


def test_ranges_and_etags(http, worker):
    job = create(http).json()["id"]
    assert done(http, job)["status"] == "completed"
    url = f"/v1/videos/{job}/content"
    whole = http.get(url)
    size, etag = len(whole.content), whole.headers["etag"]
    assert (whole.headers["content-type"], whole.headers["accept-ranges"]) == ("video/mp4", "bytes")
    for asked, start, stop in (("0-99", 0, 100), ("100-", 100, size), ("-50", size - 50, size), ("0-9999999", 0, size)):
        part = http.get(url, headers={"Range": f"bytes={asked}"})
        assert part.status_code == 206 and part.content == whole.content[start:stop]
        assert part.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
    assert http.get(url, headers={"Range": f"bytes={size}-"}).status_code == 416
    assert http.get(url, headers={"Range": "bytes=-0"}).status_code == 416
    assert http.get(url, headers={"Range": "lines=1-2"}).status_code == 200
    assert http.get(url, headers={"Range": "bytes=0-9", "If-Range": '"another"'}).content == whole.content
    known = http.get(url, headers={"If-None-Match": etag})
    assert (known.status_code, known.content) == (304, b"")
    assert http.get(f"{url}?variant=thumbnail").headers["etag"] != etag
    assert http.get(f"{url}?variant=poster").status_code == 400


def test_events_agree_with_polling(http, worker, engine):
    engine.go.clear()
    job = create(http).json()["id"]
    seen, polled = [], []

    def poll():
        while not polled or polled[-1]["status"] != "completed":
            polled.append(http.get(f"/v1/videos/{job}").json())
            time.sleep(0.05)

    polling = threading.Thread(target=poll)
    polling.start()
    threading.Timer(2.5, engine.go.set).start()
    with http.stream("GET", f"/v1/videos/{job}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("event: "):
                seen.append([line.removeprefix("event: ")])
            elif line.startswith("data: "):
                seen[-1].append(json.loads(line.removeprefix("data: ")))
    polling.join()
    names, videos = zip(*seen, strict=True)
    assert names[-1] == "completed" and set(names[:-1]) == {"progress"}
    percents = [video["progress"] for video in videos]
    assert percents == sorted(percents) and percents[-1] == 100
    assert videos[-1] == polled[-1]
    known = [{**video, "eta_seconds": None, "queue_position": None} for video in polled]
    steps = [{**video, "eta_seconds": None, "queue_position": None} for video in videos if video["step"]]
    assert steps and all(step in known for step in steps)
    assert http.get("/v1/videos/video_nothing/events").status_code == 404


def test_cancelling_stops_the_work(http, worker, engine):
    engine.go.clear()
    running = create(http).json()["id"]
    wait_for(lambda: http.get(f"/v1/videos/{running}").json()["status"] == "in_progress")
    assert http.delete(f"/v1/videos/{running}").status_code == 409
    http.post(f"/v1/videos/{running}/cancel").raise_for_status()
    ended = done(http, running)
    assert (ended["status"], ended["error"]["code"]) == ("failed", "cancelled")
    wait_for(lambda: engine.under_way == 0)
    assert http.post(f"/v1/videos/{running}/cancel").json()["status"] == "failed"
    assert http.delete(f"/v1/videos/{running}").status_code == 200


def test_cancelling_what_waits(http):
    job = create(http).json()["id"]
    assert http.post(f"/v1/videos/{job}/cancel").json()["error"]["code"] == "cancelled"


def test_a_deadline(http, worker, engine):
    engine.go.clear()
    job = create(http, deadline=time.time() + 1.5).json()["id"]
    assert done(http, job)["error"]["code"] == "deadline_exceeded"
    wait_for(lambda: engine.under_way == 0)


def test_keys_see_their_own_jobs_only(settings, tmp_path):
    file = tmp_path / "keys.json"
    ann, bob = (add_key(file, name)[0] for name in ("ann", "bob"))
    slow, _ = add_key(file, "slow", requests_per_minute=6)
    keyed = dataclasses.replace(settings, keys_file=str(file))
    with served(keyed) as address, httpx.Client(base_url=address) as http:

        def of(key):
            return {"Authorization": f"Bearer {key}"}

        for headers in ({}, of("nonsense"), of(ann[:-1] + "x"), {"Authorization": "Basic " + ann}):
            refused = create(http, headers)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        job = create(http, of(ann)).json()["id"]
        assert http.get(f"/v1/videos/{job}", headers=of(ann)).status_code == 200
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/cancel"),
            ("GET", "/content"),
            ("GET", "/events"),
        ):
            assert http.request(method, f"/v1/videos/{job}{path}", headers=of(bob)).status_code == 404
        assert http.get("/v1/videos", headers=of(bob)).json()["data"] == []
        assert http.get("/v1/models").status_code == 401
        answers = [http.get("/v1/models", headers=of(slow)) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert int(answers[1].headers["retry-after"]) >= 1
        revoke_key(file, "bob")
        time.sleep(1.1)
        assert http.get("/v1/videos", headers=of(bob)).status_code == 401
        assert http.get("/health").status_code == http.get("/docs").status_code == 200


def test_without_keys_only_this_machine_s_own_pages_may_ask(http, service):
    assert http.get("/v1/videos", headers={"Host": "evil.example"}).status_code == 421
    assert create(http, {"Origin": "https://evil.example"}).status_code == 403
    assert create(http, {"Origin": service}).status_code == 200
    assert "access-control-allow-origin" not in create(http).headers


def test_a_page_elsewhere_may_ask_where_it_was_allowed_to(settings):
    there = "https://videos.example"
    with served(dataclasses.replace(settings, origins=(there,))) as address, httpx.Client(base_url=address) as http:
        asked = {"Origin": there, "Access-Control-Request-Method": "POST"}
        before = http.options("/v1/videos", headers=asked)
        assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, there)
        assert create(http, {"Origin": there}).headers["access-control-allow-origin"] == there
        assert create(http, {"Origin": "https://evil.example"}).status_code == 403


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"[" * 100_000, "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"\xff\xfe", "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"prompt=x", "headers": {"content-type": "application/x-www-form-urlencoded"}}, 415),
        ({"content": b"x"}, 415),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data"}}, 400),
        ({"content": b"nonsense", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400),
        ({"data": {"prompt": "x"}, "files": {"input_reference": ("a.png", b"no image")}}, 400),
        ({"data": {"prompt": "x"}, "files": {"another": ("a.png", b"x")}}, 400),
        ({"data": {"prompt": "x" * 300_000}, "files": {"input_reference": ("a.png", b"x")}}, 400),
        ({"json": {"prompt": "x", "input_reference": {"image_url": "http://example.com/a.png"}}}, 400),
        ({"json": {"prompt": "x", "input_reference": {"image_url": "https://127.0.0.1/a.png"}}}, 400),
        ({"json": {"prompt": "x", "input_reference": {"image_url": "file:///etc/passwd"}}}, 400),
        ({"json": {"prompt": "x", "input_reference": {"image_url": "data:image/png;base64,AAAA"}}}, 400),
        ({"content": b'{"prompt": "\\ud800"}', "headers": {"content-type": "application/json"}}, 400),
        ({"json": {"prompt": "x", "webhook_url": "https://example.com/hook"}}, 400),
        ({"json": {"prompt": "x"}, "headers": {"Idempotency-Key": "k" * 256}}, 400),
    ],
)
def test_what_can_t_be_used_is_refused_and_nothing_breaks(http, given, status):
    answer = http.post("/v1/videos", **given)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert http.get("/v1/videos").json()["data"] == []


def test_bodies_end_where_they_must(settings, tmp_path):
    limits = dataclasses.replace(settings.images, max_bytes=100_000)
    with served(dataclasses.replace(settings, images=limits)) as address, httpx.Client(base_url=address) as http:

        def endless():
            for _ in range(200):
                yield b"x" * 65536

        for given in ({"content": endless()}, {"content": b"x" * 2_000_000}):
            answer = http.post("/v1/videos", headers={"content-type": "application/json"}, **given)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        big = {"input_reference": ("a.png", b"x" * 200_000)}
        assert http.post("/v1/videos", data={"prompt": "x"}, files=big).status_code == 400


def test_an_image_in_the_json(http, settings):
    import base64

    url = "data:image/png;base64," + base64.b64encode(PHOTO.read_bytes()).decode()
    made = create(http, input_reference={"image_url": url})
    assert made.status_code == 200
    job = JobStore(Database(settings.database)).get(made.json()["id"])
    kept = Image.open(f"{settings.storage}/{job.input_image}")
    assert (kept.format, kept.size) == ("PNG", Image.open(PHOTO).size)


def test_a_lost_worker_s_job_is_done_by_another(http, settings, engine):
    quick = dataclasses.replace(settings, leases=dataclasses.replace(settings.leases, lease_s=2.0))
    database = Database(settings.database)
    from actors.jobs.work import WorkQueue

    job = create(http).json()["id"]
    assert WorkQueue(database, quick.leases).claim("lost").job.id == job  # and is never heard of again
    with working(quick, engine):
        video = done(http, job)
    assert (video["status"], video["attempts"]) == ("completed", 2)
    database.close()


def test_a_worker_that_leaves_gives_its_jobs_back(http, settings, engine):
    engine.go.clear()
    job = create(http).json()["id"]
    with working(settings, engine):
        wait_for(lambda: http.get(f"/v1/videos/{job}").json()["step"])
    assert http.get(f"/v1/videos/{job}").json()["status"] == "queued"
    engine.go.set()
    with working(settings, engine, name="worker-2"):
        assert done(http, job)["attempts"] == 2


def test_a_pipeline_that_is_away_costs_no_job(http, settings, engine):
    from actors.errors import PipelineNotFound

    async def ready():
        if engine.failure is not None:
            asked.append(engine.failure)
            raise engine.failure

    engine.failure, asked = PipelineNotFound("there is no pipeline"), []
    job = create(http).json()["id"]
    with working(settings, engine, ready=ready):
        wait_for(lambda: len(asked) == 2)
        engine.failure = None
        assert done(http, job)["status"] == "completed"
    assert http.get(f"/v1/videos/{job}").json()["attempts"] == 2


def test_figures_and_readiness(http, worker):
    for _ in range(2):
        done(http, create(http).json()["id"])
    wait_for(lambda: "wan_step_seconds_count" in http.get("/metrics").text)
    text = wait_for(
        lambda: (
            'wan_jobs_ended_total{process="worker-1",status="completed"} 2.0' in (t := http.get("/metrics").text) and t
        )
    )
    found = {family.name: family for family in text_string_to_metric_families(text)}
    steps = sum(s.value for s in found["wan_step_seconds"].samples if s.name.endswith("_count"))
    assert steps == 2 * 4
    jobs = {s.labels["status"]: s.value for s in found["wan_jobs"].samples}
    assert jobs == {"queued": 0, "in_progress": 0, "completed": 2, "failed": 0}
    assert found["wan_chip_seconds"].samples and found["wan_http_seconds"].samples
    assert http.get("/ready").json() == {"status": "ok", "workers": 1}
    assert http.get("/health").json() == {"status": "ok"}


def test_an_eta_comes_from_the_jobs_before(http, worker, engine):
    done(http, create(http).json()["id"])
    engine.go.clear()
    ids = [create(http).json()["id"] for _ in range(8)]
    waiting = wait_for(lambda: (v := http.get(f"/v1/videos/{ids[-1]}").json())["queue_position"] == 3 and v)
    time.sleep(5)  # the forecast is looked at again
    waiting = http.get(f"/v1/videos/{ids[-1]}")
    assert waiting.json()["eta_seconds"] > 0
    assert 500 <= int(waiting.headers["openai-poll-after-ms"]) <= 5000
    engine.go.set()


def test_logs_are_json_without_prompts_or_keys(settings, tmp_path, engine):
    key, _ = add_key(tmp_path / "keys.json", "ann")
    lines = []

    class Kept(logging.Handler):
        def emit(self, record):
            lines.append(json.loads(JsonFormatter().format(record)))

    log, kept = logging.getLogger("actors"), Kept()
    log.addHandler(kept)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        keyed = dataclasses.replace(settings, keys_file=str(tmp_path / "keys.json"))
        with served(keyed) as address, httpx.Client(base_url=address) as http, working(keyed, engine):
            http.headers["Authorization"] = f"Bearer {key}"
            job = create(http, prompt="a secret wish").json()["id"]
            done(http, job)
    finally:
        log.removeHandler(kept)
        log.setLevel(level)
    life = [line["event"] for line in lines if line.get("job") == job]
    assert life.index("accepted") < life.index("begun") < life.index("completed")
    assert "secret wish" not in str(lines) and key not in str(lines) and key.split("_")[2] not in str(lines)


def test_many_jobs_are_listed_page_by_page(http, settings):
    store = JobStore(Database(settings.database))
    request = {
        "prompt": "x", "negative_prompt": "", "image": None, "height": 64, "width": 64, "frames": 9, "fps": 16,
        "steps": 4, "guidance_scale": 1, "guidance_scale_2": 1, "shift": 5, "seed": 0, "solver": "unipc",
        "model": serving.MODEL,
    }  # fmt: skip
    for _ in range(300):
        store.submit(Submission(owner="", request=request))
    ids, after = [], None
    while True:
        page = http.get("/v1/videos", params={"limit": 100} | ({"after": after} if after else {})).json()
        ids += [video["id"] for video in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert len(ids) == len(set(ids)) == 300


def test_the_dashboard_asks_for_figures_that_there_are(http, worker):
    """Grafana's queries, against the real /metrics: every name and label in them is served."""
    done(http, create(http).json()["id"])
    text = wait_for(lambda: "wan_jobs_ended_total{" in (t := http.get("/metrics").text) and t)
    families = list(text_string_to_metric_families(text))
    labels = {sample.name: set() for family in families for sample in family.samples}
    for family in families:
        for sample in family.samples:
            labels[sample.name] |= set(sample.labels)
    # Of these there are samples only once something has failed, compiled or been told.
    labels |= {
        "wan_failures_total": {"code"},
        "wan_compile_seconds_count": {"stage"},
        "wan_webhooks_total": {"outcome"},
        "wan_handoff_seconds_bucket": {"le", "stage"},
    }
    declared = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert {"wan_failures_total", "wan_compile_seconds", "wan_webhooks_total", "wan_handoff_seconds"} <= declared
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) > 10
    for query in queries:
        for name in re.findall(r"wan_\w+", query):
            assert name in labels, query
            asked = [word for found in re.findall(r"by \(([^)]*)\)", query) for word in found.split(", ")]
            asked += re.findall(r"(\w+)=~", query)
            assert set(asked) <= labels[name] | {"le"}, query


def test_snapshots_of_jobs_that_nobody_goes_on_with_are_removed(http, settings, tmp_path):
    from actors.api.upkeep import Orphans
    from actors.snapshots import Snapshots

    waiting, cancelled, deleted = (create(http).json()["id"] for _ in range(3))
    for job in (waiting, cancelled, deleted, "cat"):
        (tmp_path / f"{job}.{'0' * 16}.0010.safetensors").write_bytes(b"x")
    http.post(f"/v1/videos/{cancelled}/cancel")
    http.delete(f"/v1/videos/{deleted}")
    snapshots = Snapshots(str(tmp_path))
    assert Orphans(JobStore(Database(settings.database)), snapshots).remove() == 2
    assert snapshots.ids() == ["cat", waiting]


def test_a_job_is_a_trace_when_that_is_wanted(http, settings, engine):
    trace = pytest.importorskip("opentelemetry.sdk.trace", reason='traces need their packages ("wan-tpu[traces]")')
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from actors.api.traces import Traces

    assert Traces.from_environment() is None
    kept, provider = InMemorySpanExporter(), trace.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    with working(settings, engine, traces=Traces(provider)):
        job = create(http).json()["id"]
        done(http, job)
        spans = wait_for(lambda: len(found := kept.get_finished_spans()) == 5 and found)
    *stages, root = spans
    assert (root.name, root.attributes["job"], root.attributes["status"]) == ("video", job, "completed")
    assert [span.name for span in stages] == ["encoder", "denoise_high", "denoise_low", "decoder"]
    assert {span.parent.span_id for span in stages} == {root.context.span_id}
    assert stages[1].attributes["computed_s"] == pytest.approx(0.5, abs=0.05)
