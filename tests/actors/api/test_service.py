"""What OpenAI's client doesn't cover: idempotency, admission, ranges, keys, other sites, invalid bodies."""

import asyncio
import dataclasses
import re
import time

import pytest
from PIL import Image
from starlette.requests import Request

from actors.api.http.content import send
from actors.jobs.keys import KeyLimits, make_key, revoke_key
from tests.actors.api import serving
from tests.actors.api.serving import bearer, create, data_url, open_client, serve, wait_for_end
from tests.conftest import PHOTO
from tests.waiting import wait_for
from wan_tpu.families import published_spec
from wan_tpu.storage.local import LocalStorage


def test_the_same_key_and_body_is_the_same_job(http):
    first = create(http, {"Idempotency-Key": "k1"}, seed=1)
    again = create(http, {"Idempotency-Key": "k1"}, seed=1)
    assert first.status_code == again.status_code == 200
    assert first.json()["id"] == again.json()["id"]
    other = create(http, {"Idempotency-Key": "k1"}, seed=2)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert create(http, {"Idempotency-Key": "k2"}, seed=1).json()["id"] != first.json()["id"]
    image = {"input_reference": ("cat.png", PHOTO.read_bytes())}
    first, second = (
        http.post("/v1/videos", data={"prompt": "x"}, files=image, headers={"Idempotency-Key": "k3"}) for _ in "ab"
    )
    assert first.json()["id"] == second.json()["id"]
    conflict = http.post("/v1/videos", files={"prompt": (None, "x")}, headers={"Idempotency-Key": "k3"})
    assert conflict.status_code == 409


def test_frames_that_differ_from_the_length_are_answered_with_a_warning(http):
    video = create(http, seconds=4, num_frames=17).json()
    assert (video["num_frames"], video["seconds"], len(video["warnings"])) == (17, "1.06", 1)
    assert create(http, seconds=1, num_frames=17).json()["warnings"] == []


def test_size_beyond_the_slices_is_refused_with_the_nearest_that_fits(settings):
    small = dataclasses.replace(settings, largest=((480, 832, 81),))
    with serve(small) as address, open_client(address) as http:
        for size, frames, nearest in (
            ("832x480", 81, None),
            ("1280x720", 81, "848x464 with 81 frames"),
            ("832x480", 121, "832x480 with 81 frames"),
            ("480x832", 161, "480x832 with 81 frames"),
        ):
            answer = create(http, size=size, num_frames=frames)
            assert answer.status_code == (200 if nearest is None else 400)
            if nearest is not None:
                assert nearest in answer.json()["error"]["message"]
                wide, _, rest = nearest.partition(" with ")
                assert create(http, size=wide, num_frames=int(rest.split()[0])).status_code == 200


def test_content_is_served_in_ranges_and_by_its_etag(http, worker):
    job = create(http).json()["id"]
    assert wait_for_end(http, job)["status"] == "completed"
    url = f"/v1/videos/{job}/content"
    whole = http.get(url)
    size, etag = len(whole.content), whole.headers["etag"]
    assert (whole.headers["content-type"], whole.headers["accept-ranges"]) == ("video/mp4", "bytes")
    for span, start, stop in (("0-99", 0, 100), ("100-", 100, size), ("-50", size - 50, size), ("0-9999999", 0, size)):
        part = http.get(url, headers={"Range": f"bytes={span}"})
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


def test_download_is_redirected_to_the_bucket(tmp_path):
    """A storage with URLs of its own is read there, any other through the service."""

    class Bucket(LocalStorage):
        def url(self, name, seconds, filename):
            return f"https://storage.example/{name}?for={seconds:g}&as={filename}"

    def answer(storage, url_s, *headers):
        request = Request({"type": "http", "method": "GET", "headers": [*headers]})
        return asyncio.run(send(request, storage, "made.mp4", "video/mp4", "video_1.mp4", url_s, stall_s=30.0))

    (tmp_path / "made.mp4").write_bytes(b"video")
    away = answer(Bucket(tmp_path), 60)
    assert away.status_code == 307
    assert away.headers["location"] == "https://storage.example/made.mp4?for=60&as=video_1.mp4"
    assert answer(Bucket(tmp_path), None).status_code == answer(LocalStorage(tmp_path), 60).status_code == 200
    assert answer(Bucket(tmp_path), 60, (b"x-requested-with", b"page")).status_code == 200  # The page's scripts can't.


def test_keys_see_their_own_jobs_only(settings, database):
    ann, bob = (make_key(database, name) for name in ("ann", "bob"))
    slow = make_key(database, "slow", KeyLimits(requests_per_minute=1.2))  # One in 50 s.
    often = make_key(database, "often", KeyLimits(requests_per_minute=60_000))
    with serve(settings) as address, open_client(address) as http:

        def of(key):
            return bearer(key)

        other = [{"Authorization": text} for text in ("", "Bearer", ann, f"Basic {ann}")]
        for headers in ({}, of("nonsense"), of(ann[:-1] + "x"), *other):
            refused = create(http, headers)
            error = refused.json()["error"]
            assert (refused.status_code, error["type"]) == (401, "authentication_error")
            assert error["code"] == "invalid_api_key"
        lower = {"Authorization": f"bearer  {ann}"}  # The scheme's case doesn't matter (RFC 9110)
        assert http.get("/v1/videos", headers=lower).status_code == 200
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
        assert answers[1].json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(answers[1].headers["retry-after"]) <= 50
        for _ in range(100):  # Up to 10 s of its rate at once.
            assert http.get("/v1/models", headers=of(often)).status_code == 200
        revoke_key(database, "bob")
        time.sleep(1.1)
        assert http.get("/v1/videos", headers=of(bob)).status_code == 401
        assert http.get("/health").status_code == 200


def test_from_the_first_key_on_a_running_service_requires_one(http, database):
    open_to_all = create(http).json()["id"]
    key = bearer(make_key(database, "ann"))
    wait_for(lambda: http.get("/v1/videos").status_code == 401)
    assert http.get("/v1/videos", headers=key).json()["data"] == []  # Jobs from before belong to nobody.
    assert http.get(f"/v1/videos/{open_to_all}", headers=key).status_code == 404
    assert http.get("/v1/videos", headers={**key, "Host": "videos.example"}).status_code == 200
    revoke_key(database, "ann")
    wait_for(lambda: http.get("/v1/videos", headers=key).status_code == 401)
    assert http.get("/v1/videos").status_code == 401  # Even if no key is left.


def test_the_page_of_the_api_asks_no_other_server(http):
    page = http.get("/docs").text
    addresses = re.findall(r"""(?:src|href)=["']([^"']+)""", page)
    assert len(addresses) >= 2
    for address in addresses:
        assert address.startswith("/"), address
        assert http.get(address).status_code == 200
    assert http.get("/openapi.json").json()["info"]["title"] == "wan-tpu"


def test_without_keys_only_this_machine_s_own_pages_may_ask(http, service):
    assert http.get("/v1/videos", headers={"Host": "evil.example"}).status_code == 421
    for origin in ("https://evil.example", "http://[", "null", f"{service}.evil.example"):
        assert create(http, {"Origin": origin}).status_code == 403
    assert create(http, {"Origin": service}).status_code == 200
    elsewhere = {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "no-cors",
    }  # An image in another site's page, and a script's GET.
    assert http.get("/v1/videos", headers=elsewhere).status_code == 403
    assert http.get("/", headers=elsewhere | {"Sec-Fetch-Mode": "navigate"}).status_code == 200
    assert "access-control-allow-origin" not in create(http).headers


def test_a_video_has_the_shape_of_its_image_where_no_size_is_said(settings):
    sizes = "960x960", "720x1280", "1920x480"  # As Wan's own program rounds down.
    with serve(settings, published_spec("wan2.2-i2v-a14b")) as address, open_client(address) as http:
        [model] = http.get("/v1/models").json()["data"]
        assert (model["follows_image"], model["defaults"]["size"]) == (True, "1280x720")
        for (width, height), expected in zip([(300, 300), (90, 160), (4000, 400)], sizes, strict=True):
            image = {"image_url": data_url(Image.new("RGB", (width, height)))}
            response = create(http, input_reference=image).json()
            assert (response["size"], response["input_size"]) == (expected, f"{width}x{height}")
        assert create(http, input_reference=image, size="640x352").json()["size"] == "640x352"
        assert create(http).json()["error"]["param"] == "input_reference"


def test_a_model_says_what_it_makes_and_within_which_limits(settings):
    small = dataclasses.replace(settings, largest=((480, 832, 81),))
    with serve(small, published_spec("wan2.2-ti2v-5b")) as address, open_client(address) as http:
        [model] = http.get("/v1/models").json()["data"]
        assert http.get(f"/v1/models/{serving.MODEL}").json() == model
        assert http.get("/v1/models/another").status_code == 404
        highest = model["limits"]["seed"]["maximum"]
        assert [
            create(http, size="832x480", num_frames=81, seed=seed).status_code for seed in (highest, highest + 1)
        ] == [200, 400]
    assert (model["tasks"], model["stages"]) == (["t2v", "i2v"], ["encoder", "denoise", "decoder"])
    assert (model["size_multiple"], model["frame_step"], model["solvers"]) == (32, 4, ["unipc", "euler"])
    assert model["largest"] == [{"size": "832x480", "num_frames": 81}]
    assert model["sizes"] == ["1280x704", "704x1280", "832x480", "480x832"]
    assert model["defaults"]["size"] == "1280x704" and model["defaults"]["num_frames"] == 121
    assert model["limits"]["num_frames"] == {"minimum": 1, "maximum": 2001}


def test_a_page_elsewhere_may_ask_where_it_was_allowed_to(settings):
    there = "https://videos.example"
    with serve(dataclasses.replace(settings, origins=(there,))) as address, open_client(address) as http:
        names = "authorization, content-type, x-stainless-os"  # As OpenAI's Node client sends them.
        preflight = {
            "Origin": there,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": names,
        }
        before = http.options("/v1/videos", headers=preflight)
        assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, there)
        assert create(http, {"Origin": there}).headers["access-control-allow-origin"] == there
        assert create(http, {"Origin": "https://evil.example"}).status_code == 403


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ({"content": b"\xff\xfe", "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"prompt=x", "headers": {"content-type": "text/plain"}}, 415),
        ({"content": b"nonsense", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400),
        ({"data": {"prompt": "x"}, "files": {"input_reference": ("a.png", b"no image")}}, 400),
        ({"json": {"prompt": "x", "input_reference": {"image_url": "http://example.com/a.png"}}}, 400),
        ({"json": {"prompt": "x"}, "headers": {"Idempotency-Key": "k" * 256}}, 400),
        ({"json": {"prompt": "x"}, "headers": {"Idempotency-Key": b"a\x85b"}}, 400),
        ({"content": b'{"prompt": "x", "\\ud800": 1}', "headers": {"content-type": "application/json"}}, 400),
    ],
)
def test_unusable_body_is_refused_and_nothing_breaks(refusing, arguments, status):
    answer = refusing.post("/v1/videos", **arguments)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert refusing.get("/v1/videos").json()["data"] == []


@pytest.mark.parametrize("path", ["/v1/videos/%00", "/v1/videos?after=%00", "/v1/videos?after=%ed%a0%80"])
def test_no_part_of_an_address_reaches_the_database_unchecked(refusing, path):
    assert refusing.get(path).status_code == 404
