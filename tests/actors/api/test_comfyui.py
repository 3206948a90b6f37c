"""The nodes for ComfyUI: their client against the service, and the pack in a real ComfyUI where there is one."""

import asyncio
import importlib.util
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from actors.jobs.keys import make_key
from tests.actors.api.serving import Engine, serve, working
from tests.conftest import ROOT
from tests.waiting import wait_for

PACK = ROOT / "examples" / "comfyui"


def load_client():
    """Import the pack's client, which stands in no package of ours."""
    spec = importlib.util.spec_from_file_location("comfyui_client", PACK / "client.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


client = load_client()
PROMPT = {"prompt": "a cat"}


async def make(address, fields=PROMPT, files=None, path="/v1/videos", key="", seen=None, **settings):
    async def on_change(video):
        if seen is not None:
            seen.append(video)

    async with client.Service(address, key, **settings) as service:
        return await service.make(path, fields, files or {}, on_change)


def test_client_sends_files_and_returns_the_video(service, http, worker, engine):
    seen = []
    photo = (ROOT / "examples" / "cat.png").read_bytes()
    video, mp4 = asyncio.run(make(service, PROMPT | {"seed": "7"}, {"input_reference": ("a.png", photo)}, seen=seen))
    assert mp4 == http.get(f"/v1/videos/{video['id']}/content").content
    assert (video["status"], video["seed"], video["input_size"]) == ("completed", 7, "451x300")
    assert seen[-1]["status"] == "completed"
    longer, content = asyncio.run(make(service, PROMPT | {"video": video["id"]}, path="/v1/videos/extensions"))
    assert longer["extended_from_video_id"] == video["id"]
    assert len(content) > len(mp4)


def test_client_tells_the_services_sentence(service, http, worker, engine):
    engine.failure = ValueError("the slice is made of cheese")
    with pytest.raises(client.ServiceError) as failure:
        asyncio.run(make(service))
    [failed] = http.get("/v1/videos").json()["data"]
    assert str(failure.value) == failed["error"]["message"]
    with pytest.raises(client.ServiceError) as refusal:
        asyncio.run(make(service, PROMPT | {"num_frames": "10"}))
    refused = http.post("/v1/videos", json=PROMPT | {"num_frames": 10}).json()
    assert str(refusal.value) == refused["error"]["message"]


def test_cancelled_client_cancels_its_video(service, http, worker, engine):
    engine.go.clear()

    async def cancel_once_it_runs(wait):
        making = asyncio.create_task(make(service))
        while wait and not engine.under_way:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0)  # Without waiting, the request isn't even sent yet.
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)

    for wait in (True, False):
        asyncio.run(cancel_once_it_runs(wait))
    engine.go.set()

    def codes():
        return [video["error"] and video["error"]["code"] for video in http.get("/v1/videos").json()["data"]]

    wait_for(lambda: codes() == ["cancelled"] * 2)


def test_client_waits_for_a_service_that_restarts(settings, engine, monkeypatch):
    engine.go.clear()
    seen = []

    async def restart():
        with serve(settings) as address:
            making = asyncio.create_task(make(address, seen=seen))
            while not engine.under_way:
                await asyncio.sleep(0.02)
        before, new_socket = len(seen), socket.create_server
        monkeypatch.setattr(socket, "create_server", lambda _: new_socket(("127.0.0.1", urlsplit(address).port)))
        with serve(settings):
            while len(seen) == before:
                await asyncio.sleep(0.02)
            engine.go.set()
            return await making

    with working(settings, engine):
        video, mp4 = asyncio.run(restart())
    assert video["status"] == "completed"
    assert mp4[4:8] == b"ftyp"


def test_client_without_service_or_key_fails_at_once(settings, database):
    key = make_key(database, "artist")
    with pytest.raises(client.ServiceError):
        asyncio.run(make("http://127.0.0.1:9"))
    with serve(settings) as address, working(settings, Engine(Path(settings.storage).parent)):
        with pytest.raises(client.ServiceError):
            asyncio.run(make(address, key=key[:-1] + "x"))
        assert asyncio.run(make(address, key=key))[0]["status"] == "completed"
