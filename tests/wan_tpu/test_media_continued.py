"""Videos that continue each other as the fragments of one file."""

import errno
import itertools
import subprocess

import av
import imageio_ffmpeg
import numpy as np
import psutil
import pytest

from tests.wan_tpu.test_media_fragments import moving
from wan_tpu.errors import Unavailable
from wan_tpu.media import video
from wan_tpu.media.continued import ContinuedVideo, NotContinued
from wan_tpu.media.encoding import exact_rate
from wan_tpu.media.joining import join_videos, read_clip
from wan_tpu.media.mp4 import Mp4
from wan_tpu.media.packets import PACKET

PITCHES = 300, 500


def encode(frames, fps, sound=None, *, seed=0, hidden_frames=0, sound_frames=None):
    """Return a finished video, and its fragments as they came; `sound` is a rate and a number of channels."""
    fragments, planes = [], moving(frames)
    with Mp4(fps, fragments.append, hidden_frames=hidden_frames) as mp4:
        if sound is not None:
            rate, channels = sound
            times = np.arange(round((sound_frames or frames) / fps * rate)) / rate
            tones = [np.sin(2 * np.pi * (pitch + 100 * seed) * times) / 2 for pitch in PITCHES[:channels]]
            mp4.set_audio(np.array(tones, np.float32), rate)
        mp4.add(np.roll(planes, seed, axis=-1))
        mp4.finish()
    assert mp4.failure is None, mp4.failure
    return mp4.content, fragments


def write(folder, content, name="part.mp4"):
    """Return the path of a file with that content."""
    path = folder / name
    path.write_bytes(content)
    return path


def ffmpeg(content, *target):
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "warning", "-i", "-", *target, "-"]
    done = subprocess.run(command, input=content, capture_output=True, check=True)
    assert not done.stderr, done.stderr
    return done.stdout


def decode_frames(content):
    """Return the digest of every decoded frame, and their times in frames."""
    lines = ffmpeg(content, "-map", "0:v", "-f", "framehash").splitlines()
    fields = [line.split(b",") for line in lines if not line.startswith(b"#")]
    return [digest for *_, digest in fields], [int(time) for _, _, time, *_ in fields]


def decode_sound(content, channels):
    samples = ffmpeg(content, "-map", "0:a", "-f", "f32le")
    return np.frombuffer(samples, np.float32).reshape(-1, channels)


def check_frames(content, *parts):
    """Check that a file has the frames of its parts, at an even rate."""
    digests, times = decode_frames(content)
    own = {part: decode_frames(part)[0] for part in parts}
    assert digests == [digest for part in parts for digest in own[part]]
    assert times == list(range(len(digests)))


def check_packets(content):
    """Check that the packets of sound follow each other without gaps."""
    lines = ffmpeg(content, "-map", "0:a", "-c", "copy", "-copyts", "-f", "framehash").splitlines()
    times = [int(line.split(b",")[2]) for line in lines if not line.startswith(b"#")]
    assert times == [PACKET * (index - 1) for index in range(len(times))]


@pytest.mark.parametrize(
    ("fps", "sound", "lengths"),
    [
        (16, None, (17, 49, 9)),
        (24, (48000, 2), (33, 6, 49)),
        (23.976, (32000, 1), (22, 49)),
        (16.1234, (44100, 2), (22, 49)),
        (60, (48000, 2), (65, 33)),  # Here the sound decides where a fragment ends.
    ],
)
def test_finished_parts_have_the_fragments_that_they_had_while_they_were_decoded(
    fps, sound, lengths, tmp_path, monkeypatch
):
    # A decoder replaces noise by noise of its own, which depends on all that it has decoded before.
    monkeypatch.setattr(video, "AAC", f"{video.AAC} -aac_pns 0")
    parts = [encode(frames, fps, sound, seed=seed, hidden_frames=seed > 0) for seed, frames in enumerate(lengths)]
    rate, channels = sound or (None, 0)
    watched, finished, decoded = ContinuedVideo(fps, rate), ContinuedVideo(fps, rate), []
    for mp4, fragments in parts:
        watched.append(fragments[0])  # The first decoder is lost.
        decoded.append([watched.append(fragment) for fragment in fragments])
        file = write(tmp_path, mp4)
        next(watched.add_part(file))  # Who takes only the first fragments must begin the part again.
        assert list(watched.add_part(file)) == list(finished.add_part(file)) == decoded[-1]
    whole = b"".join(itertools.chain(*decoded))
    check_frames(whole, *(mp4 for mp4, _ in parts))
    if sound is None:
        return
    check_packets(whole)
    samples, end = decode_sound(whole, channels), 0
    for mp4, _ in parts:
        begin, end = end, end + len(decode_frames(mp4)[0])
        start, stop = (round(place / exact_rate(fps) * rate / PACKET) * PACKET for place in (begin, end))
        assert abs(start - begin / fps * rate) <= PACKET / 2
        own = decode_sound(mp4, channels)[: stop - start - PACKET]
        assert np.array_equal(samples[start:][: len(own)], own) and len(own) > PACKET
    assert len(samples) == stop - PACKET  # The sound ends so much before the last frame.


def test_a_part_of_which_only_some_fragments_are_taken_is_closed_and_changes_nothing(tmp_path):
    file, whole = write(tmp_path, encode(33, 16, (48000, 2))[0]), ContinuedVideo(16, 48000)
    fragments = whole.add_part(file)
    first = next(fragments)
    assert str(file) in [opened.path for opened in psutil.Process().open_files()]
    fragments.close()
    assert str(file) not in [opened.path for opened in psutil.Process().open_files()]
    assert next(whole.add_part(file)) == first


def test_an_unreadable_part_is_an_error_of_the_machine_or_of_the_file(tmp_path, monkeypatch):
    for path in (tmp_path / "missing.mp4", tmp_path):
        with pytest.raises(NotContinued):
            list(ContinuedVideo(16).add_part(path))

    def fail(*_args, **_options):
        raise av.error.OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(av, "open", fail)
    with pytest.raises(Unavailable):
        list(ContinuedVideo(16).add_part(write(tmp_path, b"")))


@pytest.mark.parametrize(("fps", "sound", "lengths"), [(16, (48000, 2), (1, 1, 17, 1)), (1, (44100, 2), (18, 3))])
def test_short_parts_and_slow_ones_follow_each_other(fps, sound, lengths, tmp_path):
    parts = [encode(frames, fps, sound, seed=seed) for seed, frames in enumerate(lengths)]
    watched, finished, contents = ContinuedVideo(fps, sound[0]), ContinuedVideo(fps, sound[0]), []
    for mp4, fragments in parts:
        contents += (decoded := [watched.append(fragment) for fragment in fragments])
        file = write(tmp_path, mp4)
        assert list(finished.add_part(file)) == list(watched.add_part(file)) == decoded
    check_frames(b"".join(contents), *(mp4 for mp4, _ in parts))
    check_packets(b"".join(contents))


@pytest.mark.parametrize("options", [["-bf", "3"], ["-bf", "0"]])
def test_a_video_of_another_encoder_is_cut_too(options, tmp_path):
    path, source = tmp_path / "other.mp4", "testsrc2=size=64x48:rate=16,format=yuv420p"
    target = ["-frames:v", "40", "-c:v", "libx264", *options, path]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-f", "lavfi", "-i", source, *target]
    subprocess.run(command, check=True)
    whole = ContinuedVideo(16)
    streamed = b"".join(fragment for _ in range(2) for fragment in whole.add_part(path))
    join_videos([path, path], tmp_path / "joined.mp4")
    for content in (streamed, (tmp_path / "joined.mp4").read_bytes()):
        check_frames(content, path.read_bytes(), path.read_bytes())


@pytest.mark.parametrize("fps", [16.1234, pytest.param(7.12346, marks=pytest.mark.thorough), 30000 / 1001])
def test_stream_has_the_frames_of_the_joined_file_at_any_rate(fps, tmp_path):
    first, again = (write(tmp_path, encode(9, fps, seed=seed)[0], f"{seed}.mp4") for seed in (0, 1))
    files = [first, *[again] * 12]
    whole = ContinuedVideo(fps)
    streamed = b"".join(fragment for file in files for fragment in whole.add_part(file))
    join_videos(files, tmp_path / "joined.mp4")
    for content in (streamed, (tmp_path / "joined.mp4").read_bytes()):
        check_frames(content, *(file.read_bytes() for file in files))
    write(tmp_path, streamed, "streamed.mp4")
    clips = [read_clip(tmp_path / name) for name in ("streamed.mp4", "joined.mp4")]
    assert {(clip.is_even, clip.rate) for clip in clips} == {(True, read_clip(first).rate)}


@pytest.mark.parametrize(
    ("source", "sound_frames", "sound"),
    [
        ((44100, 2), 33, (24000, 2)),  # The source's sound is encoded at the rate of the next.
        (None, None, (48000, 2)),  # The source becomes silent,
        ((44100, 2), 33, None),  # or the next part does.
        ((24000, 2), 20, (24000, 2)),  # Sound ends before the source's frames,
        ((24000, 2), 60, (24000, 2)),  # or after them.
    ],
)
def test_parts_with_other_sound_or_none_follow_each_other(source, sound_frames, sound, tmp_path):
    fps, rate = 24, (sound or source)[0]
    first, _ = encode(33, fps, source, sound_frames=sound_frames)
    second, fragments = encode(33, fps, sound, seed=1, hidden_frames=1)
    whole = ContinuedVideo(fps, sound and rate)
    before = list(whole.add_part(write(tmp_path, first)))
    fragments = [whole.append(fragment) for fragment in fragments]
    assert list(whole.add_part(write(tmp_path, second))) == fragments
    content = b"".join([*before, *fragments])
    check_frames(content, first, second)
    check_packets(content)
    samples = decode_sound(content, 2)
    assert 0 <= 65 / fps * rate - len(samples) < 1.5 * PACKET + 1
    blocks = [np.abs(samples[start : start + PACKET]).max() > 0.1 for start in range(0, len(samples), PACKET)]
    join, silence = 33 / fps * rate / PACKET, min(sound_frames or 0, 33) / fps * rate / PACKET
    for index, has_sound in enumerate(blocks):
        if not -3 < index - join < 2 and not -2 < index - silence < 3:  # Sound fades there.
            assert has_sound == (index < silence if index < join else sound is not None), index


@pytest.mark.parametrize("sound", [(48000, 1), (24000, 2)])
def test_parts_with_other_settings_do_not_follow(sound, tmp_path):
    whole, expected = ContinuedVideo(24, 48000), ContinuedVideo(24, 48000)
    first = write(tmp_path, encode(17, 24, (48000, 2))[0], "first.mp4")
    assert list(whole.add_part(first)) == list(expected.add_part(first))
    other, fragments = encode(17, 24, sound)
    with pytest.raises(NotContinued):
        whole.append(fragments[0])
    for content in (other, b"no video"):
        with pytest.raises(NotContinued):
            list(whole.add_part(write(tmp_path, content)))
    assert list(whole.add_part(first)) == list(expected.add_part(first))
