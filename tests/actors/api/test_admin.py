"""What operators see over HTTP and on their page: queues, slices, failures, costs and keys; and who may see it."""

import dataclasses

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from actors.api.core.service import Service
from actors.api.http.app import make_app
from actors.api.http.job_failures import MEANINGS
from actors.api.metrics import RecentWork
from actors.jobs.keys import KeyLimits, make_key
from actors.observe.meters import PipelineMeters
from actors.observe.status_board import ReplicaStatus, StatusBoard
from tests.actors.api.serving import bearer, create, listening, open_client, serve, wait_for_end, working
from tests.actors.small_spec import SPEC
from tests.waiting import SECONDS, wait_for

SECRETIVE = "a prompt that is nobody's business"


def read_state(http, **more):
    return http.get("/v1/admin/state", **more).raise_for_status().json()


@pytest.fixture
def keys(database):
    """Make a key of each kind, by name."""
    scopes = {"artist": ("make", "read"), "operator": ("operate",), "boss": ("admin", "operate", "make", "read")}
    return {name: make_key(database, name, KeyLimits(scopes=of, priority=5)) for name, of in scopes.items()}


def test_state_shows_queues_failures_and_costs(settings, keys, engine):
    priced = dataclasses.replace(settings, dollars={"denoise_high": 3600.0})
    with serve(priced) as address, open_client(address, headers=bearer(keys["boss"])) as http:
        waiting = [create(http, bearer(keys["artist"]), prompt=SECRETIVE, priority=n).json()["id"] for n in (0, 0, 5)]
        state = read_state(http)
        assert [(q["name"], q["priority"], q["waiting"], q["running"]) for q in state["queues"]] == [
            ("artist", 5, 1, 0),
            ("artist", 0, 2, 0),
        ]
        engine.go.clear()
        with working(priced, engine):
            running = wait_for(lambda: [job for job in read_state(http)["running"] if job["step"]])
            assert {job["id"] for job in running} <= set(waiting)
            assert running[0]["steps"] == 4
            wait_for(lambda: [p for p in read_state(http)["processes"] if p["kind"] == "worker" and p["jobs"]])
            engine.go.set()
            for job in waiting:
                wait_for_end(http, job)
            engine.failure = ValueError("out of cheese")
            failed = create(http, prompt=SECRETIVE).json()["id"]
            wait_for_end(http, failed)
            state = wait_for(lambda: (now := read_state(http))["slices"] and now["slices"][0]["utilisation"] and now)
    assert [(f["code"], f["count"]) for f in state["failures"]] == [("internal_error", 1)]
    assert [(f["id"], f["name"], f["blame"]) for f in state["failed"]] == [
        (failed, "boss", MEANINGS["internal_error"].blame)
    ]
    cost = state["cost"]
    assert (cost["videos"], cost["failed"]) == (3, 1)
    # The first two of four steps are on the four chips of the slice that has a price, a quarter of a second each.
    assert cost["dollars_a_video"] >= 2 * 0.25 * 4
    assert [slice_["name"] for slice_ in state["slices"]] == ["here"]
    assert SECRETIVE not in str(state)


def test_slices_are_those_of_the_pipeline(settings, engine):
    board = StatusBoard(PipelineMeters())
    board.report_replica("high/a", ReplicaStatus("high", "host-1", "busy", "", (("denoise_high", "video_1"),), 5.0))
    board.report_replica("high/b", ReplicaStatus("high", "host-2", "failed", "no room", (), 6.0))
    with listening(make_app(Service(settings, SPEC), board.read)) as address, open_client(address) as http:
        slices = read_state(http)["slices"]
    assert [(s["name"], s["activity"], s["where"], s["detail"]) for s in slices] == [
        ("high/a", "busy", "host-1", ""),
        ("high/b", "failed", "host-2", "no room"),
    ]
    assert slices[0]["work"] == [{"stage": "denoise_high", "id": "video_1"}]


def test_each_key_gets_what_its_scopes_allow(settings, keys):
    allowed = {None: (401, 401, 401, 401), "artist": (403,) * 4, "operator": (200, 403, 403, 403)}
    with serve(settings) as address, open_client(address) as http:
        for name, statuses in (allowed | {"boss": (200, 200, 200, 404)}).items():
            http.headers = bearer(keys[name]) if name else {}
            answers = [http.get("/v1/admin/state"), http.get("/v1/admin/keys")]
            answers.append(http.post("/v1/admin/keys", json={"name": "new"}))
            answers.append(http.delete(f"/v1/admin/keys/{'0' * 16}"))
            assert tuple(answer.status_code for answer in answers) == statuses
            assert http.get("/admin").status_code == 200  # It is empty without a key.


def test_keys_are_made_shown_once_and_revoked(settings, keys):
    with serve(settings) as address, open_client(address, headers=bearer(keys["boss"])) as http:
        made = http.post("/v1/admin/keys", json={"name": "new", "scopes": ["read"], "days": 2, "priority": 3}).json()
        secret, id_ = made["secret"], made["key"]["id"]
        assert httpx.get(f"{address}/v1/videos", headers=bearer(secret), timeout=60).status_code == 200
        listed = http.get("/v1/admin/keys")
        assert [key["name"] for key in listed.json()["data"]] == ["artist", "operator", "boss", "new"]
        for key in (*keys.values(), secret):
            assert key.split("_")[2] not in listed.text
        assert made["key"]["expires_at"] - made["key"]["created_at"] == pytest.approx(2 * 86400)
        assert http.delete(f"/v1/admin/keys/{id_}").json()["revoked_at"] is not None
        assert httpx.get(f"{address}/v1/videos", headers=bearer(secret), timeout=60).status_code == 401
        own = keys["boss"].split("_")[1]
        assert http.delete(f"/v1/admin/keys/{own}").status_code == 409


def test_first_key_needs_no_key_but_is_an_admin(http):
    assert http.post("/v1/admin/keys", json={"name": "first"}).status_code == 400
    made = http.post("/v1/admin/keys", json={"name": "first", "scopes": ["admin"]}).json()
    assert http.get("/v1/admin/keys").status_code == 401
    assert http.get("/v1/admin/keys", headers=bearer(made["secret"])).status_code == 200


def test_recent_work_is_of_the_last_hour():
    now, registry = [0.0], CollectorRegistry()
    work = RecentWork(lambda: now[0])
    registry.register(work)

    def read():
        lines = generate_latest(registry).decode().splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith("wan_")]

    work.add("high/a", 20)
    now[0] = 1800
    work.add("high/a", 30)
    assert read() == [50, 1800]
    now[0] = 3700
    assert read() == [30, 3600]
    work.add("high/b", 1)
    assert read() == [30, 1, 3600]


def test_page_for_operators(settings, keys, engine, browser):
    from tests.actors.api.browsing import audit

    with serve(settings) as address, working(settings, engine), open_client(address) as http:
        engine.failure = ValueError("out of cheese")
        job = create(http, bearer(keys["artist"]), prompt=SECRETIVE).json()["id"]
        http.headers.update(bearer(keys["boss"]))
        wait_for_end(http, job)
        page = browser.new_page()
        page.set_default_timeout(1000 * SECONDS)
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda entry: entry.type == "error" and " 401 " not in entry.text and problems.append(entry))
        page.goto(f"{address}/admin")
        page.get_by_label("Key", exact=True).fill(keys["boss"])
        page.get_by_role("button", name="Open").click()
        page.get_by_role("region", name="Latest failures").get_by_text("internal_error").wait_for()
        page.get_by_label("Name", exact=True).fill("guest")
        page.get_by_role("button", name="Make key").click()
        page.get_by_text("The new key.").wait_for()
        secret = page.locator("#made code").text_content()
        assert httpx.get(f"{address}/v1/videos", headers=bearer(secret), timeout=60).status_code == 200
        audit(page, phone=True)
        revoke = page.get_by_role("button", name="Revoke guest")
        revoke.click()
        revoke.click()
        revoke.wait_for(state="detached")
        assert httpx.get(f"{address}/v1/videos", headers=bearer(secret), timeout=60).status_code == 401
        page.close()
        assert problems == []
