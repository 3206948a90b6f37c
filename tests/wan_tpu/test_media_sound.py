"""Videos with sound: what a player hears, when, and what becomes of errors."""

import re
import subprocess

import imageio_ffmpeg
import numpy as np
import pytest
from diffusers.utils import load_video

from wan_tpu.data import Video
from wan_tpu.errors import OutputError
from wan_tpu.media.mp4 import Mp4
from wan_tpu.media.reading import read_frames
from wan_tpu.media.video import VideoWriter

FFMPEG = imageio_ffmpeg.get_ffmpeg_exe()
FPS, FRAMES, RATE = 24, 49, 48000
LEFT, RIGHT = 440, 880  # Hz
SECONDS = 2.01  # A little less than the 2.04 s of the frames, as LTX-2 makes it.


def tones(rate=RATE, channels=2):
    times = np.arange(round(SECONDS * rate)) / rate
    return np.stack([np.sin(2 * np.pi * hertz * times) / 2 for hertz in (LEFT, RIGHT)][:channels]).astype(np.float32)


def noise(frames=FRAMES):
    return np.random.default_rng(0).integers(0, 255, (frames, 3, 48, 64), np.uint8)


def encode(audio, rate=RATE, frames=FRAMES):
    with Mp4(FPS) as video:
        if audio is not None:
            video.set_audio(audio, rate)
        for start in range(0, frames, 10):
            video.add(noise(frames)[start : start + 10])
        video.finish()
    assert video.failure is None, video.failure
    return video.content


def decode(path, channels=2):
    command = [FFMPEG, "-v", "error", "-i", path, "-map", "0:a", "-f", "f32le", "-"]
    return np.frombuffer(subprocess.check_output(command), np.float32).reshape(-1, channels).T


def describe(path):
    return subprocess.run([FFMPEG, "-hide_banner", "-i", path], capture_output=True, text=True).stderr


@pytest.mark.parametrize("rate", [pytest.param(48000, marks=pytest.mark.thorough), 24000])
def test_each_channel_has_its_tone_at_its_time(tmp_path, rate):
    path, audio = tmp_path / "video.mp4", tones(rate)
    path.write_bytes(encode(audio, rate))
    decoded = decode(path)
    # The last of AAC's blocks of 1024 samples is filled up.
    assert audio.shape[1] <= decoded.shape[1] < audio.shape[1] + 1024
    for channel, hertz in enumerate((LEFT, RIGHT)):
        spectrum = np.abs(np.fft.rfft(decoded[channel, :rate]))
        assert spectrum.argmax() == hertz
        # The other tone of the two is 40 dB softer at least.
        assert spectrum[LEFT + RIGHT - hertz] < spectrum[hertz] / 100
    # The middle, away from the edges: AAC is lossy, but it neither shifts nor scales what it keeps.
    middle = slice(rate // 2, rate * 3 // 2)
    assert np.abs(decoded[:, middle] - audio[:, middle]).max() < 0.1


def test_file_says_what_it_holds(tmp_path):
    path = tmp_path / "video.mp4"
    path.write_bytes(encode(tones()))
    text = describe(path)
    assert re.search(r"Audio: aac \(LC\).* 48000 Hz, stereo, .* (18|19)\d kb/s", text), text
    assert "Duration: 00:00:02.04, start: 0.000000" in text  # The frames' length, not the shorter sound's.
    assert "Video: h264 (High)" in text and "yuv420p(tv, bt709" in text
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")  # Players can start before they have the whole file.
    assert len(load_video(str(path))) == len(read_frames(path, FRAMES)) == FRAMES


def test_sound_changes_no_frame(tmp_path):
    hashes = []
    for name, audio in (("silent.mp4", None), ("sound.mp4", tones())):
        (tmp_path / name).write_bytes(encode(audio))
        command = [FFMPEG, "-v", "error", "-i", tmp_path / name, "-map", "0:v", "-c", "copy", "-f", "framehash", "-"]
        hashes.append(subprocess.check_output(command))
    assert hashes[0] == hashes[1] and hashes[0].count(b"\n") > FRAMES
    assert "Audio" not in describe(tmp_path / "silent.mp4")


def test_same_sound_gives_the_same_bytes():
    first = encode(tones())
    assert first == encode(tones())
    assert first != encode(tones() / 2)


def test_sound_may_be_longer_than_the_frames_and_of_one_channel(tmp_path):
    path = tmp_path / "video.mp4"
    path.write_bytes(encode(tones(channels=1), frames=9))
    assert "mono" in describe(path) and "Duration: 00:00:02.0" in describe(path)
    assert decode(path, 1).shape[1] >= SECONDS * RATE
    assert len(load_video(str(path))) == 9


def test_saved_video_has_its_sound(tmp_path):
    pixels = np.zeros((9, 48, 64, 3), np.float32)
    path = Video(pixels, FPS, tones(), RATE).save(tmp_path / "video.mp4")
    assert np.abs(np.fft.rfft(decode(path)[1, :RATE])).argmax() == RIGHT
    assert [path.name for path in tmp_path.iterdir()] == ["video.mp4"]


def test_long_sound_blocks_neither_pipe(tmp_path):
    # Far more of both than any buffer holds: 8 MB of sound, 9 MB of frames.
    audio = np.random.default_rng(1).uniform(-0.5, 0.5, (2, 20 * RATE)).astype(np.float32)
    with Mp4(4) as video:
        video.set_audio(audio, RATE)
        for _ in range(4):
            video.add(np.zeros((20, 3, 160, 240), np.uint8))
        video.finish()
    assert video.failure is None
    (tmp_path / "video.mp4").write_bytes(video.content)
    assert "Duration: 00:00:20.0" in describe(tmp_path / "video.mp4")


def test_sound_that_ffmpeg_refuses_leaves_nothing(tmp_path):
    for audio in (np.full((2, RATE), np.nan, np.float32), tones()[:, None].repeat(40, 1).reshape(80, -1)):
        with pytest.raises(OutputError, match=r"video\.mp4"):
            with VideoWriter(tmp_path / "video.mp4", fps=FPS, planes=True) as writer:
                writer.set_audio(audio, RATE)
                writer.write(noise())
        assert list(tmp_path.iterdir()) == []


def test_killed_ffmpeg_is_an_output_error(tmp_path):
    with pytest.raises(OutputError, match=r"video\.mp4.*-9"):
        with VideoWriter(tmp_path / "video.mp4", fps=FPS, planes=True) as writer:
            writer.set_audio(tones(), RATE)
            writer.write(noise(1))
            writer._ffmpeg.kill()
            writer.write(np.zeros((200, 3, 480, 640), np.uint8))
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_an_output_error(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.TemporaryFile", lambda: open("/dev/full", "w+b", buffering=0))  # noqa: SIM115
    with pytest.raises(OutputError, match=r"sound.*video\.mp4.*No space left on device"):
        with VideoWriter(tmp_path / "video.mp4", fps=FPS, planes=True) as writer:
            writer.set_audio(tones(), RATE)
            writer.write(noise(1))
    assert list(tmp_path.iterdir()) == []


def test_sound_is_set_before_the_first_frame(tmp_path):
    with pytest.raises(ValueError, match="sound"):
        with VideoWriter(tmp_path / "video.mp4", fps=FPS, planes=True) as writer:
            writer.write(noise(1))
            writer.set_audio(tones(), RATE)
