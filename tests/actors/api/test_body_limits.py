"""Limits on what a request may hold: one reading process at a time, bytes within a budget, and no unexpected body."""

import asyncio
import io
import threading

from PIL import Image

from tests.actors.api import fetching
from tests.actors.api.conftest import NAME
from tests.actors.api.serving import change_limits, create, data_url, open_client, serve
from tests.actors.api.test_hostile import Sent
from tests.conftest import PHOTO
from tests.waiting import wait_for


def noise(side, kind="PNG"):
    out = io.BytesIO()
    Image.effect_noise((side, side), 90).convert("RGB").save(out, kind)
    return out.getvalue()


def test_images_that_are_fetched_count_with_the_bodies(hook_settings, hook):
    image, go_on = noise(300), threading.Event()
    assert 200_000 < len(image) < 400_000

    async def slowly(writer):
        whole = fetching.answer(image)
        writer.write(whole[:200_000])
        await writer.drain()
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        writer.write(whole[200_000:])

    hook.answers["/slow.png"], hook.answers["/a.png"] = slowly, fetching.answer(image)
    answers = []
    body = {"input_reference": {"image_url": f"https://{NAME}:{hook.port}/slow.png"}}
    with (
        serve(change_limits(hook_settings, bodies_bytes=400_000)) as address,
        open_client(address) as http,
    ):
        first = threading.Thread(target=lambda: answers.append(create(http, **body)))
        first.start()
        wait_for(lambda: hook.requests)
        other = {"input_reference": {"image_url": f"https://{NAME}:{hook.port}/a.png"}}
        refused = wait_for(lambda: (response := create(http, **other)).status_code != 200 and response)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        go_on.set()
        first.join()
        assert answers[0].status_code == 200
        assert create(http, **other).status_code == 200  # The memory is free again.


def test_pictures_that_are_made_count_with_the_bodies(settings):
    files = {"input_reference": noise(512, "JPEG")}
    with serve(change_limits(settings, bodies_bytes=800_000)) as address, open_client(address) as http:
        refused = http.post("/v1/videos", data={"prompt": "x", "size": "1024x1024"}, files=files)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_large")
        assert http.post("/v1/videos", data={"prompt": "x", "size": "64x64"}, files=files).status_code == 200
        assert len(http.get("/v1/videos").json()["data"]) == 1


def test_a_route_without_a_body_takes_none_but_a_small_one(http):
    job = create(http).json()["id"]
    for method, path in (("POST", "/cancel"), ("DELETE", ""), ("GET", ""), ("GET", "/content")):
        for length in ("Content-Length: 10000000", "Transfer-Encoding: chunked"):
            refused = Sent(http, [f"{method} /v1/videos/{job}{path} HTTP/1.1", length])
            assert wait_for(lambda refused=refused: refused.status) == 413
            assert refused.answered.lower().count(b"connection: close") == 1
            refused.close()
    assert http.get(f"/v1/videos/{job}").json()["status"] == "queued"
    small = http.post(f"/v1/videos/{job}/cancel", json={})
    assert small.status_code == 200 and "connection" not in small.headers


def test_an_image_s_url_has_an_end(http):
    error = create(http, input_reference={"image_url": f"https://a.test/{'a' * 9000}.png"}).json()["error"]
    assert error["param"] == "input_reference.image_url"
    inline = data_url(PHOTO.read_bytes())
    assert len(inline) > 8192 and create(http, input_reference={"image_url": inline}).status_code == 200
