"""Fragments of an mp4 that come while its frames are encoded."""

import re
import resource
import subprocess
import time

import imageio_ffmpeg
import numpy as np
import pytest

from wan_tpu.errors import OutputError
from wan_tpu.media.fragments import FRAGMENT_FRAMES, FragmentSplitter
from wan_tpu.media.mp4 import Mp4
from wan_tpu.media.video import VideoWriter

FFMPEG = imageio_ffmpeg.get_ffmpeg_exe()
RATE, CHUNK = 48000, 4  # A chunk of the VAE is four frames.


def moving(frames):
    """Return planes of a gradient that moves."""
    y, x = np.mgrid[:48, :64]
    planes = [[(x * 4 + y * plane + 5 * time) % 256 for plane in range(3)] for time in range(frames)]
    return np.array(planes, np.uint8)


def tone(frames, fps):
    return np.sin(np.arange(round(frames / fps * RATE)) / RATE * 2 * np.pi * 440).astype(np.float32)[None] / 2


def encode(frames, fps=16, sound=False, on_fragment=None):
    """Return the finished file of frames that come in chunks."""
    planes = moving(frames)
    with Mp4(fps, on_fragment) as video:
        if sound:
            video.set_audio(tone(frames, fps), RATE)
        for start in range(0, frames, CHUNK):
            video.add(planes[start : start + CHUNK])
        video.finish()
    assert video.failure is None, video.failure
    return video.content


def kinds(content):
    """Return the kinds of an mp4's boxes."""
    boxes, at = [], 0
    while at < len(content):
        boxes.append(content[at + 4 : at + 8].decode())
        at += int.from_bytes(content[at : at + 4], "big")
    assert at == len(content), "a box is cut"
    return boxes


def hash_frames(path, *streams):
    """Return the hash and the time of every decoded frame, and of every block of sound."""
    command = [FFMPEG, "-v", "error", "-i", path, *streams, "-f", "framehash", "-"]
    return [line for line in subprocess.check_output(command).splitlines() if not line.startswith(b"#")]


def describe(path):
    output = subprocess.run([FFMPEG, "-hide_banner", "-i", path], capture_output=True, text=True).stderr
    video = re.search(r"yuv420p\(.*?\), 64x48.*?([\d.]+) fps", output)
    return video.group(0).split(", ")[0], video.group(1), re.findall(r"(Audio: aac \(LC\)).*?(\d+ Hz, \w+)", output)


@pytest.mark.parametrize(
    ("frames", "fps", "sound", "count"),
    [(81, 16, False, 6), (1, 16, False, 1), (49, 24, True, 4), (50, 23.976, False, 4)],
)
def test_joined_fragments_are_the_finished_video(tmp_path, frames, fps, sound, count):
    fragments = []
    finished = encode(frames, fps, sound, fragments.append)
    assert finished == encode(frames, fps, sound), "the finished file depends on the fragments"
    assert [kinds(fragment) for fragment in fragments] == [
        ["ftyp", "moov", "moof", "mdat"],
        *[["moof", "mdat"]] * (len(fragments) - 1),
    ]
    assert len(fragments) == count
    whole, joined = tmp_path / "whole.mp4", tmp_path / "joined.mp4"
    whole.write_bytes(finished)
    joined.write_bytes(b"".join(fragments))
    pictures = hash_frames(joined, "-map", "0:v")
    assert pictures == hash_frames(whole, "-map", "0:v") and len(pictures) == frames
    if sound:
        blocks, expected = (hash_frames(path, "-map", "0:a") for path in (joined, whole))
        assert blocks[: len(expected) - 1] == expected[:-1]  # A file alone says where the last block of sound ends.
    assert describe(joined) == describe(whole)
    again = []
    encode(frames, fps, sound, again.append)
    assert again == fragments, "the same frames give other bytes"


def test_first_fragments_come_long_before_the_last_frame():
    """After the frames of a fragment and the few that the encoder keeps back."""
    frames, written, came = 160, 0, []
    planes = moving(frames)
    with Mp4(16, lambda fragment: came.append(written)) as video:
        for start in range(0, frames, CHUNK):
            video.add(planes[start : start + CHUNK])
            written = start + CHUNK
            expected = max(0, (written - 2 * CHUNK) // FRAGMENT_FRAMES)
            until = time.monotonic() + 20
            while len(came) < expected and time.monotonic() < until:
                time.sleep(0.002)
        video.finish()
    assert len(came) == frames // FRAGMENT_FRAMES
    assert came[0] <= FRAGMENT_FRAMES + 2 * CHUNK
    assert came[-2] < frames


def test_splitter_cuts_at_the_same_bytes_however_they_come():
    fragments = []
    encode(40, on_fragment=fragments.append)
    splitter, cut = FragmentSplitter(), []
    for byte in b"".join(fragments):
        cut += splitter.add(bytes([byte]))
    assert cut == fragments


def test_path_of_the_file_may_have_any_characters(tmp_path):
    folder, fragments = tmp_path / r"a|b 'c' [d]\:e", []
    with VideoWriter(folder / "video.mp4", fps=16, planes=True, on_fragment=fragments.append) as writer:
        writer.write(moving(5))
    assert [path.name for path in folder.iterdir()] == ["video.mp4"]
    assert (folder / "video.mp4").read_bytes() == encode(5)
    assert len(fragments) == 1


def test_file_that_can_not_be_written_is_an_error_with_fragments_too(tmp_path):
    """A disk that is full ends ffmpeg, though the pipe of the fragments still takes everything."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    frames = np.random.default_rng(0).integers(0, 255, (40, 3, 240, 320), np.uint8)
    with pytest.raises(OutputError, match=r"video\.mp4"):
        with VideoWriter(tmp_path / "video.mp4", fps=16, planes=True, on_fragment=lambda fragment: None) as writer:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
            try:
                writer.write(frames[:1])  # Starts ffmpeg, which inherits the limit.
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            writer.write(frames)
    assert list(tmp_path.iterdir()) == []


def test_abandoned_video_leaves_no_thread(tmp_path):
    writer = VideoWriter(tmp_path / "video.mp4", fps=16, planes=True, on_fragment=lambda fragment: None)
    with pytest.raises(ValueError, match="the caller's"), writer:
        writer.write(moving(5))
        raise ValueError("the caller's")
    assert not writer._fragments._thread.is_alive()
    assert list(tmp_path.iterdir()) == []
