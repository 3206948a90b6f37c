"""Eight parts of one moving picture and one sound, as segments write them: nobody sees or hears where they meet."""

import itertools

import numpy as np
import pytest

from tests.wan_tpu.test_joining import frames as read_frames
from tests.wan_tpu.test_joining import sound as read_sound
from wan_tpu.media.continued import ContinuedVideo
from wan_tpu.media.encoding import LEAD
from wan_tpu.media.joining import join_videos
from wan_tpu.media.mp4 import Mp4, cut_sound
from wan_tpu.media.packets import PACKET, count_packets, open_media
from wan_tpu.tail import find_sample

FPS, RATE, FRAMES, SHARED, BLENDED, PARTS, SHIFT = 24, 32000, 39, 22, 5, 8, 2
STEP = FRAMES - SHARED
WHOLE = FRAMES + (PARTS - 1) * STEP


@pytest.fixture(scope="module")
def truth():
    """The whole: planes that move to the right, and chords with a little noise, a burst of which lies at a join."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(40, 215, (8, 12)).repeat(8, 0).repeat(8, 1)
    planes = np.stack([np.broadcast_to(np.roll(coarse, SHIFT * i, 1), (3, 64, 96)) for i in range(WHOLE)])
    times = np.arange(round(WHOLE / FPS * RATE) + RATE // FPS) / RATE
    tones = [np.sin(2 * np.pi * pitch * times * (1 + times / 20)) for pitch in (220, 331, 1270, 3100)]
    sound = np.stack([sum(tones), sum(tones[1:])]) / 8 + rng.normal(0, 0.01, (2, len(times)))
    return planes.astype(np.uint8), sound.astype(np.float32)


@pytest.fixture(scope="module")
def parts(truth):
    """Files and fragments of segments, each of which begins with the end of the one before."""
    made = []
    for index in range(PARTS):
        origin, fragments = index * STEP, []
        hidden, last = (SHARED - BLENDED if index else 0), index + 1 == PARTS
        written = None if last else FRAMES - hidden - BLENDED
        where = origin if index else None
        with Mp4(FPS, fragments.append, hidden_frames=hidden, written_frames=written, sound_origin=where) as mp4:
            begin = round(origin / FPS * RATE)
            mp4.set_audio(truth[1][:, begin : begin + round((FRAMES + 1) / FPS * RATE)], RATE)
            mp4.add(truth[0][origin : origin + FRAMES].astype(np.uint8))
            mp4.finish()
        assert mp4.failure is None, mp4.failure
        made.append((mp4.content, fragments))
    return made


@pytest.fixture(scope="module", params=["file", "fragments"])
def whole(request, parts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    path = folder / "whole.mp4"
    if request.param == "fragments":
        stream, content = ContinuedVideo(FPS, RATE), []
        for _, fragments in parts:
            content += [stream.append(fragment) for fragment in fragments]
            stream.end_part()
        path.write_bytes(b"".join(content))
        return path
    files = [folder / f"{index}.mp4" for index in range(PARTS)]
    for file, (content, _) in zip(files, parts, strict=True):
        file.write_bytes(content)
    join_videos(files, path)
    return path


JOINS = [FRAMES - BLENDED + index * STEP for index in range(PARTS - 1)]


def test_motion_and_brightness_go_on(whole, truth):
    shown = read_frames(whole).astype(np.float64)
    assert len(shown) == WHOLE
    means = shown.mean(axis=(1, 2, 3))
    assert np.abs(np.diff(means)).max() < 0.5 and np.ptp(means) < 1
    for before, after in itertools.pairwise(shown.mean(axis=3)):
        spectrum = np.fft.rfft2(before).conj() * np.fft.rfft2(after)
        correlation = np.fft.irfft2(spectrum / np.maximum(np.abs(spectrum), 1e-9))
        assert np.unravel_index(correlation.argmax(), correlation.shape) == (0, SHIFT)


def test_sound_goes_on(whole, truth):
    heard, expected = read_sound(whole).T, truth[1]
    end = min(heard.shape[1], round((WHOLE - 2) / FPS * RATE))
    difference, span = heard[:, :end] - expected[:, :end], PACKET // 2

    def measure(values, place):
        """Return the energy around a place, in decibels."""
        return 10 * np.log10(np.mean(values[:, place - span : place + span] ** 2))

    places = {round(join / FPS * RATE / PACKET): round(join / FPS * RATE) for join in JOINS}
    inside = [number for number in range(2, end // PACKET - 1) if not {number - 1, number, number + 1} & places.keys()]
    worst = max(measure(difference, number * PACKET) for number in inside)  # The encoder's bits are spread unevenly.
    for number, exact in places.items():
        for place in (exact, number * PACKET, number * PACKET - span, number * PACKET + span):
            assert abs(measure(heard, place) - measure(expected, place)) < 0.2  # Without a lead it is 2 to 3.
            assert measure(difference, place) < worst + 3
    first, last = (measure(difference, place) for place in (min(places.values()), max(places.values())))
    assert last < first + 1.5  # It doesn't drift.


def test_each_part_alone_is_a_video(parts, tmp_path):
    for index, (content, _) in enumerate(parts):
        path = tmp_path / f"{index}.mp4"
        path.write_bytes(content)
        samples = len(read_sound(path)) - round(len(read_frames(path)) / FPS * RATE)
        assert 0 <= samples <= 2 * PACKET + RATE // FPS


@pytest.mark.parametrize("rate", [16000, 24000, 44100, 48000])
@pytest.mark.parametrize("fps", [8, 23.976, 25, 50, 60, 120])
def test_sound_begins_in_time_however_short_the_hidden_frames_are(rate, fps):
    for origin, hidden in [(0, 9), (16, 9), (1000, 9), (17, 17), (1000, 1)]:
        begin = find_sample(origin, rate, fps)
        end = begin + find_sample(hidden, rate, fps) + 8 * PACKET
        whole = np.arange(1, end + 1)[None]  # Each sample is its place in the whole video.
        cut, *_ = cut_sound(whole[:, begin:], rate, fps, hidden=hidden, origin=origin)
        places = np.arange(PACKET * (count_packets(origin + hidden, rate, fps) - LEAD), end)
        np.testing.assert_array_equal(cut[0], np.where(places < begin, 0, places + 1))


def test_sound_goes_on_at_a_high_frame_rate(truth):
    """Nine hidden frames at 120 a second are shorter than the four packets that lead to the others."""
    fps, shared, blended, sound = 120, 25, 16, truth[1]
    stream, content = ContinuedVideo(fps, RATE), []
    for index in range(3):
        origin, fragments = index * (FRAMES - shared), []
        begin, hidden = round(origin / fps * RATE), (shared - blended if index else 0)
        written = None if index == 2 else FRAMES - hidden - blended
        where = origin if index else None
        with Mp4(fps, fragments.append, hidden_frames=hidden, written_frames=written, sound_origin=where) as mp4:
            mp4.set_audio(sound[:, begin : begin + round((FRAMES + 1) / fps * RATE)], RATE)
            mp4.add(truth[0][origin : origin + FRAMES])
            mp4.finish()
        content += map(stream.append, fragments)
        stream.end_part()
    with open_media(b"".join(content)) as file:
        heard = np.concatenate([frame.to_ndarray() for frame in file.decode(audio=0)], axis=1)
    assert heard.shape[1] > (FRAMES + 2 * (FRAMES - shared)) / fps * RATE - 2 * PACKET
    for place in range(PACKET, heard.shape[1] - PACKET, PACKET // 2):
        span = slice(place, place + PACKET)
        assert 10 * np.log10(np.mean((heard[:, span] - sound[:, span]) ** 2)) < -45  # The sound itself has -16.
