"""What a cancelled join and a killed process leave behind: no running ffmpeg, and files only for a while."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import imageio_ffmpeg
import psutil
import pytest

from wan_tpu.errors import Unavailable
from wan_tpu.media.joining import join_videos
from wan_tpu.media.temporary import open_folder

KILLED = """
import sys
from pathlib import Path
import numpy as np
from wan_tpu.media.joining import join_videos
from wan_tpu.media.mp4 import Mp4
with Mp4(8) as mp4:
    mp4.add(np.zeros((1, 3, 32, 48), np.uint8))
    join_videos([Path(path) for path in sys.argv[1:3]], Path(sys.argv[3]))
"""


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Two files that take half a minute to join, since the first must be converted to the rate of the second."""
    folder = tmp_path_factory.mktemp("clips")
    paths = [folder / "hour.mp4", folder / "segment.mp4"]
    for path, source in zip(paths, ("s=48x32:r=1:d=3600", "s=48x32:r=60:d=1"), strict=True):
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-f", "lavfi", "-i", f"color=gray:{source}", path]
        subprocess.run(command, check=True)
    return paths


def find_join(process):
    """Wait until a process converts the first of the files to join, and return the ffmpegs that it has started."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        commands = {child: read_command(child) for child in process.children()}
        ffmpegs = {child: words for child, words in commands.items() if any("ffmpeg" in word for word in words[:1])}
        if any(word.endswith("/0.mp4") for words in ffmpegs.values() for word in words):
            return list(ffmpegs)
        time.sleep(0.02)
    raise AssertionError("no file is joined")


def read_command(process):
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def wait_for_end(processes):
    _, running = psutil.wait_procs(processes, timeout=10)
    assert not running


def test_cancelled_join_ends_its_ffmpeg(clips, tmp_path):
    cancelled = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(join_videos, clips, tmp_path / "whole.mp4", cancelled=cancelled)
        processes = find_join(psutil.Process())
        cancelled.set()
        with pytest.raises(Unavailable):
            joining.result(10)
    wait_for_end(processes)
    assert not list(tmp_path.iterdir())


def test_killed_process_leaves_no_ffmpeg_and_its_files_are_removed(clips, tmp_path, monkeypatch):
    temporary, results = tmp_path / "temporary", tmp_path / "results"
    temporary.mkdir()
    results.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    output = results / "joined.mp4"
    with subprocess.Popen([sys.executable, "-c", KILLED, *clips, output]) as process:
        children = find_join(psutil.Process(process.pid))
        assert len(children) == 2  # One that joins files, and one that encodes frames.
        process.kill()
    wait_for_end(children)
    left = [*temporary.iterdir(), *results.iterdir()]
    assert len(left) == 2
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    join_videos(clips[1:], output)
    with open_folder() as first, open_folder() as second:
        assert sorted(temporary.iterdir()) == sorted([first, second])
        assert list(results.iterdir()) == [output]
