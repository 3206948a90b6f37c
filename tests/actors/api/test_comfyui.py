"""The nodes for ComfyUI: their client against the service, and the pack in a real ComfyUI where there is one."""

import asyncio
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from PIL import Image

from actors.jobs.keys import make_key
from tests.actors.api.serving import Engine, serve, working
from tests.actors.api.test_sound import streams
from tests.actors.small_spec import SOUND_SPEC
from tests.conftest import PHOTO, ROOT
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
        for _ in range(2):  # As ComfyUI does, whose loop cancels all tasks when one of them has failed.
            making.cancel()
            await asyncio.sleep(0.001)
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


def find_free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@pytest.fixture
def comfyui(tmp_path):
    """Run ComfyUI with the pack, and return its address, the port of the service that it asks, and its folder.

    COMFYUI is a checkout of it, and COMFYUI_PYTHON a Python with its requirements.
    """
    checkout = os.environ.get("COMFYUI")
    if not checkout:
        pytest.skip("COMFYUI names no checkout of ComfyUI")
    folder, port = tmp_path / "comfyui", find_free_port()
    (folder / "custom_nodes").mkdir(parents=True)
    (folder / "custom_nodes" / "wan-tpu").symlink_to(PACK)
    (folder / "input").mkdir()
    shutil.copy(PHOTO, folder / "input" / "example.png")
    command = [os.environ.get("COMFYUI_PYTHON", sys.executable), "main.py", "--cpu", "--port", str(port)]
    command += ["--base-directory", str(folder), "--preview-method", "auto"]
    service_port = find_free_port()
    environment = os.environ | {"WAN_TPU_URL": f"http://127.0.0.1:{service_port}"}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=log, stderr=log)
    try:
        wait_for(lambda: "To see the GUI" in (folder / "log").read_text() or process.poll())
        yield f"http://127.0.0.1:{port}", service_port, folder
    finally:
        process.terminate()
        process.wait(30)


class Comfy:
    """A client of ComfyUI's HTTP API."""

    def __init__(self, address):
        self.http = httpx.Client(base_url=address, timeout=60)

    def start(self, graph):
        """Queue a graph, and return its id."""
        answer = self.http.post("/prompt", json={"prompt": graph})
        assert answer.status_code == 200, answer.text
        return answer.json()["prompt_id"]

    def wait(self, prompt):
        """Return what ComfyUI remembers of a graph that has ended: its outputs and its messages."""
        history = wait_for(lambda: self.http.get(f"/history/{prompt}").json().get(prompt))
        return history["outputs"], dict(history["status"]["messages"])


def node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs}


def generate(**inputs):
    defaults = {
        "prompt": "a cat",
        "negative_prompt": "",
        "seed": 3,
        "seconds": 0,
        "preset": "",
        "width": 0,
        "height": 0,
    }
    return node("WanTPUGenerateVideo", **defaults | inputs)


class SoundEngine(Engine):
    """Makes frames whose shade says which they are, with silence."""

    model = SOUND_SPEC


@pytest.mark.long
def test_pack_in_comfyui(comfyui, settings, tmp_path, monkeypatch, browser):
    """A graph of every node, its pictures and sound; and the shipped workflow in ComfyUI's page."""
    address, port, folder = comfyui
    comfy = Comfy(address)
    new_socket = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda _: new_socket(("127.0.0.1", port)))
    (tmp_path / "frames").mkdir()
    engine = SoundEngine(tmp_path / "frames")
    with serve(settings, SOUND_SPEC), working(settings, engine):
        graph = {
            "1": node("LoadImage", image="example.png"),
            "2": node(
                "WanTPUSettings",
                num_inference_steps=3,
                guidance_scale=-1.0,
                shift=-1.0,
                num_frames=-1,
                fps=-1,
                sound="yes",
                more="guidance_scale_2 = 2",
            ),
            "3": generate(image=["1", 0], settings=["2", 0]),
            "4": node("SaveImage", images=["3", 1], filename_prefix="frames"),
            "5": node("SaveAudio", audio=["3", 2], filename_prefix="sound"),
            "6": node("SaveVideo", video=["3", 0], filename_prefix="made", format="auto", codec="auto"),
            "7": node(
                "WanTPUContinueVideo",
                **{"prompt": "on", "negative_prompt": "", "seed": 4, "seconds": 0, "preset": "", "video_id": ["3", 4]},
            ),
            "8": node("SaveVideo", video=["7", 0], filename_prefix="longer", format="auto", codec="auto"),
        }
        _, messages = comfy.wait(comfy.start(graph))
        assert "execution_success" in messages, messages
        first, second = engine.requests
        assert (first.steps, first.guidance_scale_2, first.seed, first.prompt) == (3, 2, 3, "a cat")
        assert (second.seed, second.prompt) == (4, "on")
        frames = [np.asarray(Image.open(path).convert("RGB")) for path in sorted((folder / "output").glob("frames*"))]
        assert len(frames) == first.frames
        # H.264 keeps an even grey within 2 of 255.
        assert all(np.abs(frame - (i * 7 + 3.0)).max() <= 2 for i, frame in enumerate(frames))
        for name in ("made*", "longer*"):
            [file] = (folder / "output").glob(name)
            assert streams(file.read_bytes()) == ["Video: h264", "Audio: aac"]
        assert len(list((folder / "output").glob("sound*"))) == 1

        page = browser.new_page()
        seen = []
        page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: seen.append(frame)))
        page.goto(address)
        wait_for(lambda: page.evaluate("!!(window.app && window.app.graph)"))
        workflow = json.loads((PACK / "example_workflows" / "image_to_video.json").read_text())
        page.evaluate("async workflow => { await app.loadGraphData(workflow); await app.queuePrompt(0); }", workflow)
        wait_for(lambda: len(list((folder / "output" / "video").glob("wan-tpu*"))) == 2)
        progress = [json.loads(text) for text in seen if isinstance(text, str) and '"progress_state"' in text]
        values = {one["value"] for state in progress for one in state["data"]["nodes"].values() if one["max"] == 100}
        assert any(0 < value < 100 for value in values)
        page.close()
