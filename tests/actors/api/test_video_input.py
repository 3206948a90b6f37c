"""Videos in the API that new ones begin as: every form, hostile files, and what the pipeline gets."""

import asyncio
import contextlib
import io
import subprocess
import time

import imageio_ffmpeg
import numpy as np
import psutil
import pytest
from openai import OpenAI
from PIL import Image

from actors.api.limits import ServiceLimits
from actors.api.untrusted.body_parts import CLIP
from actors.api.untrusted.memory_file import open_memory_file
from actors.api.untrusted.reader import Reader
from actors.jobs.store import open_database
from actors.jobs.tables import File
from tests.actors.api import serving
from tests.actors.api.serving import change_limits, create, data_url, open_client, serve, wait_for_end, working
from tests.actors.small_spec import SmallSpec
from tests.waiting import wait_for
from tests.wan_tpu.shown_clips import FPS, KINDS
from tests.wan_tpu.test_media_shown import LOSS, assert_shown
from wan_tpu.errors import InvalidRequest
from wan_tpu.media.joining import read_clip
from wan_tpu.media.reading import open_video, read_frames
from wan_tpu.media.shown import Fit
from wan_tpu.media.video_content import VideoContent


class TakesVideo(SmallSpec):
    takes_video = True


def film(*options, source="testsrc=s=96x64:r=16:d=1", kind="mp4"):
    """Return a video file that ffmpeg makes."""
    flags = ["-movflags", "frag_keyframe+empty_moov"] if kind == "mp4" else []
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-f", "lavfi", "-i", source, *options, *flags]
    return subprocess.run([*command, "-f", kind, "-"], capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def mp4():
    colours = "scale=out_color_matrix=bt709,format=yuv420p,setparams=colorspace=bt709"
    return film("-vf", colours, "-qp", "0")


@pytest.fixture
def http(settings, engine):
    spec = engine.model = TakesVideo(serving.SPEC.config)
    with working(settings, engine), serve(settings, spec) as address, open_client(address) as client:
        client.timeout = 30
        yield client


def test_a_video_is_continued_from_its_end(settings, engine, mp4):
    class Continues(SmallSpec):
        takes_video = continues_video = True
        frame_offset = 9

    spec = engine.model = Continues(serving.SPEC.config)
    with working(settings, engine), serve(settings, spec) as address, open_client(address) as http:
        [model] = http.get("/v1/models").json()["data"]
        assert (model["takes_video"], model["continues_video"]) == (True, True)
        assert wait_for_end(http, create(http, video=data_url(mp4, MP4)).json()["id"])["status"] == "completed"
        [request] = engine.requests
        assert (request.strength, request.frames, len(shown_to(engine, 16))) == (1, 9, 16)
        error = create(http, video=data_url(mp4, MP4), strength=0.5).json()["error"]
        assert error["param"] == "strength"
        short = film("-pix_fmt", "yuv420p", source="testsrc=s=96x64:r=16:d=0.5")
        error = create(http, video=data_url(short, MP4)).json()["error"]
        assert error["param"] == "video"


def shown_to(engine, count=9):
    """Return the frames that the pipeline's latest request begins as."""
    return np.stack([np.asarray(frame, int) for frame in read_frames(engine.requests[-1].video, count)])


def test_every_form_reaches_the_pipeline(http, engine, mp4, tmp_path, settings):
    (tmp_path / "sent.mp4").write_bytes(mp4)
    sent = np.stack([np.asarray(frame, int) for frame in read_frames(tmp_path / "sent.mp4", 9)])
    form = {"prompt": (None, "snow"), "strength": (None, "0.5"), "video": ("a.mp4", mp4)}
    jobs = [http.post("/v1/videos", files=form).json()]
    jobs.append(create(http, video={"video_url": data_url(mp4, MP4)}).json())
    for job in jobs:
        assert (wait_for_end(http, job["id"])["status"], job["video_size"], job["size"]) == (
            "completed",
            "96x64",
            "96x64",
        )
        assert np.abs(shown_to(engine) - sent).mean() < 1.5
    assert [request.strength for request in engine.requests] == [0.5, 0.8] and jobs[0]["strength"] == 0.5
    assert [request.image for request in engine.requests] == [None] * 2
    content = http.get(f"/v1/videos/{jobs[0]['id']}/content", params={"variant": "input_video"})
    assert content.headers["content-type"] == "video/mp4" and content.content == engine.requests[0].video.content
    with OpenAI(base_url=str(http.base_url).rstrip("/") + "/v1", api_key="none", max_retries=0) as client:
        by_id = client.videos.create(prompt="rain", extra_body={"video": {"id": jobs[0]["id"]}, "num_frames": "5"})
        assert client.videos.poll(by_id.id).status == "completed"
    source = http.get(f"/v1/videos/{jobs[0]['id']}/content").content
    (tmp_path / "source.mp4").write_bytes(source)
    first = np.stack([np.asarray(frame, int) for frame in read_frames(tmp_path / "source.mp4", 5)])
    assert np.abs(shown_to(engine, 5) - first).max() <= 4
    with serve(change_limits(settings, video_bytes=1000), engine.model) as address, open_client(address) as strict:
        assert create(strict, video={"id": jobs[0]["id"]}).json()["error"]["param"] == "video"
    remixed = http.post(f"/v1/videos/{jobs[0]['id']}/remix", json={"prompt": "other"}).json()
    assert wait_for_end(http, remixed["id"])["status"] == "completed"
    assert engine.requests[-1].video == engine.requests[0].video and engine.requests[-1].strength == 0.5
    http.delete(f"/v1/videos/{jobs[0]['id']}")
    with open_database(settings.database).read() as session:
        assert all(file.delete_at is not None for file in session.query(File) if file.job == jobs[0]["id"])
    assert http.get("/v1/models").json()["data"][0]["takes_video"] is True


def test_another_shape_is_cropped_and_the_size_follows_the_video(http, engine):
    tall = film("-pix_fmt", "yuv420p", source="color=red:s=64x128:r=16:d=1")
    job = create(http, video=data_url(tall, MP4)).json()
    height, width = TakesVideo(serving.SPEC.config).size_like((128, 64))
    assert (job["size"], job["video_size"]) == (f"{width}x{height}", "64x128")
    assert create(http, video=data_url(tall, MP4), size="96x64").json()["size"] == "96x64"


def test_what_cant_be_is_refused(http, settings, mp4):
    for fields, param, named in (
        ({"video": data_url(mp4, MP4), "num_frames": 25}, "video", "13"),
        ({"strength": 0.5}, "strength", ""),
        ({"video": data_url(mp4, MP4), "strength": 0.1}, "strength", "0.25"),
        ({"video": data_url(mp4, MP4), "strength": 7}, "strength", "1"),
        ({"video": {"id": "video_" + "1" * 48}}, "video", ""),
        ({"video": "https://10.0.0.1/a.mp4"}, "video", ""),
        ({"video": {"id": "video_" + "1" * 48}, "input_reference": data_url(mp4, MP4)}, "input_reference", ""),
    ):
        error = create(http, **fields).json()["error"]
        assert error["param"] == param and named in error["message"], (fields.keys(), error)
    with serve(settings) as address, open_client(address) as plain:
        error = create(plain, video=data_url(mp4, MP4)).json()["error"]
        assert error["param"] == "video" and "wan2.1-t2v-14b" in error["message"]


def read(content, *, limits=ServiceLimits(), convert=False):  # noqa: B008 (frozen)
    """Have a reading process cut a video, or convert all of it."""

    async def ask():
        with open_memory_file(content) as file:
            async with Reader(limits).read(CLIP, file, "ann") as reading:
                if convert:
                    return await reading.convert_video(Fit(32, 48, 16), 16)
                return await reading.cut_video(Fit(32, 48, 16), 9, step=4)

    return asyncio.run(ask())


def count_ffmpegs():
    names = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(process.name())
    return sum(name.startswith("ffmpeg") for name in names)


def test_all_of_a_video_is_converted_however_it_begins_and_ends(tmp_path):
    late = tmp_path / "late.mp4"
    late.write_bytes(film("-f", "lavfi", "-i", "sine=d=1.5", "-vf", "setpts=PTS+0.5/TB", "-pix_fmt", "yuv420p"))
    (tmp_path / "all.mp4").write_bytes(read(late.read_bytes(), convert=True)[0])
    clip = read_clip(tmp_path / "all.mp4")  # Its frames begin with its sound.
    assert (clip.frames, clip.is_even, clip.rate) == (24, True, 16)
    for source, frames in (("color=s=96x64:r=60:d=0.016", 1), ("color=s=96x64:r=16:d=0.5", 8)):
        assert read(film(source=source), convert=True)[1] == frames


# Reading is tested with all kinds in tests/wan_tpu/test_media_shown.py; here each changes what is cut and converted.
CONVERTED = ("turned by 90", "variable rate", "GIF")


@pytest.mark.parametrize(
    "name", [name if name in CONVERTED else pytest.param(name, marks=pytest.mark.thorough) for name in KINDS]
)
def test_an_upload_of_every_kind_has_the_frames_that_are_shown(name, tmp_path):
    kind = KINDS[name]
    path = tmp_path / f"clip{kind.suffix}"
    kind.make(path)
    count, height, width = kind.shown.shape[:3]

    async def ask():
        with open_memory_file(path.read_bytes()) as file:
            async with Reader(ServiceLimits()).read(CLIP, file, "ann") as reading:
                assert reading.sizes == {"video": (height, width)}
                cut = await reading.cut_video(Fit(height, width), count, step=4)
                return cut, *await reading.convert_video(Fit(height, width), FPS)

    cut, converted, frames, end = asyncio.run(ask())
    assert frames == count
    for mp4 in (cut, converted):
        assert_shown(read_frames(VideoContent(mp4), count), kind.shown, kind.tolerance + LOSS)
        with open_video(VideoContent(mp4)) as shown:
            assert (shown.rate, shown.count_frames()) == (FPS, count)
    assert_shown([Image.open(io.BytesIO(end))], kind.shown[-1:], kind.tolerance + LOSS)


MP4 = "video/mp4"
HLS = "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{}\n#EXT-X-ENDLIST\n"


def test_broken_and_hostile_files_are_refused(mp4, tmp_path):
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(mp4)
    for content in (
        mp4[:600],
        film(source="sine=d=1", kind="mp3"),  # Sound alone.
        f"ffconcat version 1.0\nfile '{secret}'\n".encode(),
        HLS.format(f"file://{secret}").encode(),
    ):
        with pytest.raises(InvalidRequest) as refused:
            read(content)
        assert refused.value.field == "video"
    with pytest.raises(InvalidRequest, match="9000000"):
        read(film(source="color=s=4096x4096:d=0.1"))
    assert len(read(mp4[: len(mp4) * 4 // 5])) > 1000  # What came before the end is enough.
    with pytest.raises(InvalidRequest, match=r"\b100\b"):
        read(mp4, limits=ServiceLimits(video_bytes=100))


def test_a_process_has_one_time_for_all_videos_however_often_it_reads_some():
    async def ask():
        with open_memory_file() as file:
            file.write(film())
            async with Reader(ServiceLimits(reader_s=1, video_wait_s=0.5)).read(CLIP, file, "key") as reading:
                for _ in range(1000):
                    await reading.cut_video(Fit(64, 96), 9, step=4)

    with pytest.raises(InvalidRequest, match="more memory or time"):
        asyncio.run(ask())


def test_a_bomb_of_frames_costs_no_more_than_it_may():
    many = film("-preset", "ultrafast", source="color=s=16x16:r=1000:d=5")
    assert len(read(many)) < 10_000  # No more frames are decoded than are asked for.
    with pytest.raises(InvalidRequest, match=r"\b4 s\b"):
        read(many, limits=ServiceLimits(video_s=4), convert=True)
    # All frames are shown at the same moment, so that each is decoded and none is kept.
    flat = ["-vf", "setpts=0", "-fps_mode", "passthrough", "-preset", "ultrafast"]
    at_once = film(*flat, source="color=s=16x16:r=1000:d=20", kind="matroska")
    start = time.monotonic()
    for limits in (ServiceLimits(video_cpu_s=1), ServiceLimits(reader_s=0.1, video_wait_s=0.6)):
        with pytest.raises(InvalidRequest, match=r"more memory or time|has \d frames"):
            read(at_once, limits=limits)
    assert time.monotonic() - start < 20
    wait_for(lambda: count_ffmpegs() == 0)
