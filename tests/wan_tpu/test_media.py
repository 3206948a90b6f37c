"""Videos that are written, whose colours a player shows, and videos that are read, about as diffusers reads them."""

import base64
import shutil
import subprocess

import imageio_ffmpeg
import numpy as np
import pytest
from diffusers.utils import load_video
from PIL import Image

from tests.wan_tpu.shown_clips import KINDS, run
from wan_tpu.errors import InvalidRequest
from wan_tpu.media.reading import read_frames
from wan_tpu.media.video import VideoWriter

FFMPEG = imageio_ffmpeg.get_ffmpeg_exe()
COLOURS = np.array([(220, 30, 30), (30, 220, 30), (30, 30, 220), (200, 180, 40), (128, 128, 128), (255, 255, 255)])
MATRICES = {"bt709": (0.2126, 0.0722), "bt601": (0.299, 0.114)}  # The shares of red and blue in a pixel's luma.
# Converting to eight bits of YUV and back loses up to a level each way; x264 at crf 17 keeps flat fields.
TOLERANCE = 2


@pytest.fixture(scope="module", params=[(48, 96, False), (720, 96, True)], ids=["below 720 lines", "720 lines"])
def bars(request, tmp_path_factory):
    """A video of bars in known colours, as both kinds of frames that are written, and its (height, width)."""
    height, width, planes = request.param
    path = tmp_path_factory.mktemp("bars") / "bars.mp4"
    frame = np.repeat(COLOURS, width // len(COLOURS), 0)[None].repeat(height, 0).astype(np.uint8)
    with VideoWriter(path, fps=16, planes=planes) as writer:
        writer.write([frame[..., [1, 2, 0]].transpose(2, 0, 1) if planes else frame] * 2)
    return path, height, width


def middles(pixels):
    """Return the pixel in the middle of each bar of [H, W, 3]."""
    step = pixels.shape[1] // len(COLOURS)
    return pixels[pixels.shape[0] // 2, step // 2 :: step].astype(float)


def test_video_says_its_colours(bars):
    path, _, _ = bars
    if shutil.which("ffprobe"):
        entries = "stream=color_range,color_space,color_transfer,color_primaries"
        command = ["ffprobe", "-v", "error", "-show_entries", entries, "-of", "csv=p=0", str(path)]
        assert subprocess.check_output(command, text=True).split() == ["tv,bt709,bt709,bt709"]
    output = subprocess.run([FFMPEG, "-hide_banner", "-i", str(path)], capture_output=True, text=True).stderr
    assert "yuv420p(tv, bt709, progressive)" in output  # which means the matrix, the primaries and the transfer
    assert b"colrnclx\0\1\0\1\0\1\0" in path.read_bytes()  # in the container, for players that don't look further


def test_colours_are_those_of_the_matrix_that_the_video_says(bars):
    path, height, width = bars
    command = [FFMPEG, "-v", "error", "-i", str(path), "-frames:v", "1", "-f", "rawvideo", "-pix_fmt", "yuv420p", "-"]
    planes = np.frombuffer(subprocess.check_output(command), np.uint8).astype(float)
    luma = (planes[: height * width].reshape(height, width) - 16) / 219
    blue, red = (planes[height * width :].reshape(2, height // 2, width // 2).repeat(2, 1).repeat(2, 2) - 128) / 224
    errors = {}
    for name, (of_red, of_blue) in MATRICES.items():
        r, b = luma + 2 * (1 - of_red) * red, luma + 2 * (1 - of_blue) * blue
        g = (luma - of_red * r - of_blue * b) / (1 - of_red - of_blue)
        errors[name] = np.abs(255 * middles(np.stack([r, g, b], -1)) - COLOURS).max()
    assert errors["bt709"] <= TOLERANCE and errors["bt601"] > 20, errors


def play_in_browser(*paths):
    """Return the first frame of videos as Chromium shows it, uint8 [H, W, 3]; skip the test without Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("there is no Chromium (Debian: apt-get install chromium)")
    draw = """async source => {
        const video = document.createElement("video");
        video.src = source;
        video.muted = true;
        await new Promise((resolve, reject) => {
            video.requestVideoFrameCallback(resolve);
            video.onerror = reject;
            video.play().then(() => video.pause());
        });
        const canvas = new OffscreenCanvas(video.videoWidth, video.videoHeight).getContext("2d");
        canvas.drawImage(video, 0, 0, video.videoWidth, video.videoHeight);
        const pixels = canvas.getImageData(0, 0, video.videoWidth, video.videoHeight).data;
        return [video.videoHeight, video.videoWidth, Array.from(pixels)];
    }"""
    frames = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for path in paths:
            source = "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()
            height, width, pixels = browser.new_page().evaluate(draw, source)
            frames.append(np.array(pixels, np.uint8).reshape(height, width, 4)[..., :3])
        browser.close()
    return frames


SHOWN_IN_BROWSERS = (
    "turned by 90",
    "sample aspect ratio",
    "edit list",
    "full range without a matrix",  # Without a GPU, Chromium takes every full range for that of BT.601.
    "720 lines without colours",
)


@pytest.mark.long
def test_what_is_read_is_what_a_browser_shows(tmp_path):
    paths = []
    for name in SHOWN_IN_BROWSERS:
        KINDS[name].make(tmp_path / "lossless.mp4")
        paths.append(tmp_path / f"{name}.mp4")
        # Chromium plays no lossless H.264.
        options = ["-c:v", "libx264", "-qp", "4", "-map_metadata", "0", "-profile:v", "high"]
        run("-noautorotate", "-i", tmp_path / "lossless.mp4", *options, paths[-1])
    for name, path, shown in zip(SHOWN_IN_BROWSERS, paths, play_in_browser(*paths), strict=True):
        read = np.asarray(read_frames(path, 1)[0], float)
        assert read.shape == shown.shape, name
        assert np.abs((read - shown).mean((0, 1))).max() <= 6 and np.abs(read - shown).mean() <= 4, name


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("10 bits.mp4", ["-c:v", "libx264", "-pix_fmt", "yuv420p10le"]),
        ("whole colours.mp4", ["-c:v", "libx264", "-pix_fmt", "yuv444p"]),
        ("gray.mp4", ["-c:v", "libx264", "-pix_fmt", "gray"]),
        ("deep rgb.mkv", ["-c:v", "ffv1", "-pix_fmt", "gbrp12le"]),
        ("deep alpha.mov", ["-c:v", "prores_ks", "-profile:v", "4444", "-pix_fmt", "yuva444p10le"]),
        ("odd sides.mkv", ["-vf", "crop=63:47:0:0:exact=1", "-c:v", "ffv1", "-pix_fmt", "yuv444p"]),
        ("late.mp4", ["-vf", "setpts=PTS+0.5/TB"]),
        ("turned.mp4", ["turned"]),
    ],
)
def test_video_is_read_as_diffusers_reads_it_but_rounded_to_the_nearest(name, how, tmp_path):
    source, path = ["-f", "lavfi", "-i", "testsrc2=size=64x48:rate=10:duration=1"], tmp_path / name
    if how == ["turned"]:
        subprocess.run([FFMPEG, "-v", "error", *source, tmp_path / "upright.mp4"], check=True)
        source, how = ["-display_rotation", "90", "-i", tmp_path / "upright.mp4"], ["-c", "copy"]
    subprocess.run([FFMPEG, "-v", "error", *source, *how, path], check=True)
    expected = load_video(str(path))
    frames = read_frames(path, len(expected))
    theirs, ours = (np.stack([np.asarray(frame, float) for frame in frames]) for frames in (expected, frames))
    # ffmpeg's default conversion, which diffusers uses, rounds each of three sums down.
    assert -0.3 <= (ours - theirs).mean() <= 2 and np.median(np.abs(ours - theirs)) <= 2
    assert frames[0].size == expected[0].size and (frames[0].width < frames[0].height) == (name == "turned.mp4")
    with pytest.raises(InvalidRequest, match=rf"\b{len(expected)} frames.*\b99\b"):
        read_frames(path, 99)


def test_each_picture_of_a_gif_is_shown_for_its_time(tmp_path):
    path, shades = tmp_path / "a.gif", [Image.new("RGB", (64, 48), (0, 9 * i, 200)) for i in range(5)]
    durations = [40, 400, 40, 80, 40]
    shades[0].save(path, save_all=True, append_images=shades[1:], duration=durations)
    shown = [i for i, duration in enumerate(durations) for _ in range(duration // 40)]
    frames = read_frames(path, len(shown))
    assert [frame.getpixel((9, 9)) for frame in frames] == [(0, 9 * i, 200) for i in shown]
    for count, step, nearest in ((17, 4, 13), (16, 8, 8), (20, 16, 4)):
        with pytest.raises(InvalidRequest, match=rf"\b{nearest}$"):
            read_frames(path, count, step=step)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(InvalidRequest, match="mp4"):
        read_frames(path, 1)
