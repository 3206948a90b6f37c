"""One reader of videos: every way in gets the frames that are shown, and they are the ones that were painted."""

import subprocess

import numpy as np
import pytest

from tests.wan_tpu.shown_clips import FFMPEG, FPS, FRAMES, HEIGHT, KINDS, LEFT, SOUNDS, WIDTH, paint, play, run
from wan_tpu.errors import InvalidRequest
from wan_tpu.media.encoding import exact_rate
from wan_tpu.media.joining import join_videos, prepare_source, read_clip
from wan_tpu.media.reading import count_frames, open_video, read_ending, read_ends, read_frame, read_frames, read_sound
from wan_tpu.media.shown import Fit
from wan_tpu.media.video import VideoWriter
from wan_tpu.media.video_content import VideoContent

LOSS = 0.6  # What encoding at crf 17 may move a frame's mean by.


# The others go the way of one of these, with another angle, curve, or omission.
OFTEN = ("turned by 90", "sample aspect ratio", "edit list", "PQ", "full range", "variable rate")
READ = ["begins after its sound", "wide colours without a curve", "720 lines without colours", "RGB"]
READ += ["milliseconds as its rate", "GIF"]


def kinds(all_kinds, often, rarely=()):
    """Parametrise a test with all kinds: `rarely` is for `make test-long`, what is in neither for `make thorough`."""
    marks = {kind: () if kind in often else pytest.mark.long for kind in (*often, *rarely)}
    return [pytest.param(kind, marks=marks.get(kind, pytest.mark.thorough)) for kind in all_kinds]


@pytest.fixture
def clip(request, tmp_path):
    """A file of a kind, the frames that it shows, and how far a mean may be from them."""
    kind = KINDS[request.param]
    path = tmp_path / f"clip{kind.suffix}"
    kind.make(path)
    return path, kind.shown, kind.tolerance


def assert_shown(pictures, shown, tolerance):
    """Check that frames are those that are shown, each at its place."""
    frames = np.stack([np.asarray(picture, float) for picture in pictures])
    assert frames.shape == shown.shape
    # Chroma has half of the resolution, so single pixels may differ more than the mean.
    distances = np.abs(frames - shown)
    assert np.abs((frames - shown).mean((1, 2))).max() <= tolerance
    assert distances.mean() <= 2 * tolerance
    # Each frame is closer to the one in its place than to any other that differs.
    for index, frame in enumerate(frames):
        others = np.abs(frame - shown).mean((1, 2, 3))
        assert others[index] == others.min()


@pytest.mark.parametrize("clip", kinds(KINDS, OFTEN, READ), indirect=True)
def test_every_way_in_gets_the_frames_that_are_shown_and_continues_them(clip, tmp_path):
    path, shown, tolerance = clip
    count, height, width = shown.shape[:3]
    content = VideoContent(path.read_bytes())
    for video in (path, content):
        with open_video(video) as opened:
            assert (opened.height, opened.width, opened.count_frames()) == (height, width, count)
        assert_shown(read_frames(video, count), shown, tolerance)
        # It is the picture that looks so once it is encoded.
        assert_shown([read_frame(video, count - 1)], shown[-1:], tolerance + LOSS)
        assert count_frames(video, FPS) == count
        assert_shown(read_ends(video, count - 3, FPS), shown[[0, -3, -2, -1]], tolerance)

    source = prepare_source(path, tmp_path, Fit(height, width), FPS)
    last = read_frame(source, count - 1)
    assert_shown([last], shown[-1:], tolerance + LOSS)
    part, joined = tmp_path / "part.mp4", tmp_path / "all.mp4"
    with VideoWriter(part, fps=FPS) as writer:
        writer.write(np.stack([np.asarray(last)] * 4))
    join_videos([source, part], joined)
    whole = np.concatenate([shown, np.stack([shown[-1]] * 4)])
    assert_shown(read_frames(joined, count + 4), whole, tolerance + LOSS)


def write_own(path):
    """Write a clip as this program does."""
    with VideoWriter(path, fps=FPS) as writer:
        writer.write(play())
    return path


def end_earlier(plain, path):
    """Let the edit list hide the last four frames."""
    content = bytearray(plain.read_bytes())
    lasts = content.index(b"elst") + 12
    content[lasts : lasts + 4] = (600).to_bytes(4, "big")  # Milliseconds.
    path.write_bytes(content)


# How it is changed, the frames that it shows then, and whether its packets stay.
OWN_OTHERWISE = {
    "mirrored": (lambda path, plain: run("-display_hflip", "-i", plain, "-c", "copy", path), play()[:, :, ::-1], False),
    "begun later": (
        lambda path, plain: run("-ss", "0.3", "-i", plain, "-c", "copy", path),
        play(*range(3, FRAMES)),
        False,
    ),
    "ended earlier": (lambda path, plain: end_earlier(plain, path), play(*range(6)), False),
    "moved to another container": (lambda path, plain: run("-i", plain, "-c", "copy", path), play(), True),
}


@pytest.mark.parametrize("how", OWN_OTHERWISE)
def test_a_clip_of_ours_that_is_shown_otherwise_is_converted(how, tmp_path):
    change, shown, is_kept = OWN_OTHERWISE[how]
    plain, path, joined = write_own(tmp_path / "plain.mp4"), tmp_path / "clip.mp4", tmp_path / "all.mp4"
    change(path, plain)
    folder = tmp_path / "folder"
    folder.mkdir()
    assert (prepare_source(path, folder, Fit(HEIGHT, WIDTH, 40), FPS) == path) == is_kept
    join_videos([path, plain], joined)
    assert_shown(read_frames(joined, len(shown) + FRAMES), np.concatenate([shown, play()]), 1 + LOSS)


STILL = paint(3)


def make_noise(deviation, channels):
    """Return coarse noise [48, 72, channels]."""
    return np.random.default_rng(3).normal(0, deviation, (6, 9, channels)).repeat(8, 0).repeat(8, 1)


PICTURES = {"noisy": STILL + make_noise(12, 1), "clipped": 15 + make_noise(40, 3)}


@pytest.mark.parametrize("name", kinds(PICTURES, ["clipped"]))
def test_colours_stay_when_a_video_is_continued_from_its_own_file_again_and_again(name, tmp_path):
    still = np.clip(PICTURES[name], 0, 255).astype(np.uint8)
    part, whole = tmp_path / "part.mp4", tmp_path / "whole.mp4"
    with VideoWriter(whole, fps=FPS) as writer:
        writer.write(still[None].repeat(4, 0))
    for times in range(1, 11):
        folder = tmp_path / str(times)
        folder.mkdir()
        source = prepare_source(whole, folder, Fit(*still.shape[:2]), FPS)
        assert source == whole  # A file of ours is copied, not encoded again.
        last = np.asarray(read_frame(source, 4 * times - 1))
        with VideoWriter(part, fps=FPS, overwrite=True) as writer:
            writer.write(last[None].repeat(4, 0))
        join_videos([source, part], whole)
    frames = np.stack([np.asarray(frame, float) for frame in read_frames(whole, 44)])
    assert np.abs((frames[0] - still).mean((0, 1))).max() <= 1
    assert np.abs((frames[-1] - frames[3]).mean((0, 1))).max() <= 0.5
    assert np.abs(frames[-1] - frames[3]).mean() <= 3


def test_colour_that_eight_bits_of_yuv_cannot_hold_moves_once_by_a_level(tmp_path):
    path, colour = tmp_path / "flat.mp4", np.array([208, 166, 233])
    shown = [np.full((48, 72, 3), colour, np.uint8)]
    for _ in range(2):
        with VideoWriter(path, fps=FPS, overwrite=True) as writer:
            writer.write(np.stack([shown[-1]] * 4))
        shown.append(np.asarray(read_frame(path, 3)))
    assert np.abs(shown[1].mean((0, 1)) - colour).max() == 1
    assert np.array_equal(shown[2], shown[1])


def listen(path, start_s, stop_s):
    """Return a part of a file's sound, float32 [2, n], at 44.1 kHz."""
    command = [FFMPEG, "-v", "error", "-i", path, "-map", "0:a", "-ac", "2", "-ar", "44100", "-f", "f32le", "-"]
    samples = np.frombuffer(subprocess.check_output(command), "<f4").reshape(-1, 2).T
    return samples[:, round(start_s * 44100) : round(stop_s * 44100)]


def assert_tones(sound, tones, start_s, stop_s, rate=44100):
    """Check the loudest tone of each side within a part of a sound, [1 or 2, n]."""
    sound = np.broadcast_to(sound, (2, sound.shape[1]))[:, round(start_s * rate) : round(stop_s * rate)]
    for side, tone in zip(sound, tones, strict=True):
        spectrum = np.abs(np.fft.rfft(side))
        assert spectrum.argmax() * rate / sound.shape[1] == pytest.approx(tone, abs=3)
        assert 0.02 < np.abs(side).max() < 1


# The others have channels that one of these has, or a rate that is taken as it is.
HEARD = "mono", "stereo at 192 kHz", "5.1", "nine channels without names", "begins after its frames"


@pytest.mark.parametrize("codec", ["ours", pytest.param("mpeg4", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", kinds(SOUNDS, HEARD))
def test_sound_of_every_kind_is_read_as_it_is_played_and_goes_on_in_stereo(name, codec, tmp_path):
    kind = SOUNDS[name]
    plain, path, joined = (tmp_path / f"{part}.mov" for part in ("plain", "clip", "all"))
    write_own(plain.with_suffix(".mp4"))
    kind.accompany(plain.with_suffix(".mp4"), path, *([] if codec == "ours" else ["-c:v", codec, "-q:v", "2"]))
    for video in (path, VideoContent(path.read_bytes())):
        sound, rate = read_sound(video, 1)
        assert (rate, sound.shape) == (kind.rate, (min(kind.channels, 2), kind.rate))
        assert not sound[:, : round((kind.starts - 0.01) * rate)].any() or not kind.starts
        assert_tones(sound, kind.tones, kind.starts + 0.1, 0.9, rate)
        frames, ending = read_ending(video, fps=FPS, count=4)
        assert len(frames) == 4 and ending[1] == rate
        assert np.array_equal(ending[0], sound[:, -round(4 / FPS * rate) :])
    source = prepare_source(path, tmp_path, Fit(HEIGHT, WIDTH), FPS)
    join_videos([source, plain.with_suffix(".mp4"), source], joined)
    heard = listen(joined, 0, 9)
    for start in (0, 2):
        silence = heard[:, round((start + 0.1) * 44100) : max(0, round((start + kind.starts - 0.1) * 44100))]
        assert np.abs(silence).max(initial=0) < 0.01
        assert_tones(heard, kind.tones, start + kind.starts + 0.1, start + 0.9)
    assert np.abs(heard[:, round(1.1 * 44100) : round(1.9 * 44100)]).max() < 0.01
    assert heard.shape[1] / 44100 == pytest.approx(3, abs=0.1)
    assert read_clip(joined).sound[::2] == ("aac", "mono" if (name, codec) == ("mono", "ours") else "stereo")


def test_a_file_without_sound_says_so(tmp_path):
    with pytest.raises(InvalidRequest, match="sound"):
        read_sound(write_own(tmp_path / "plain.mp4"), 1)
    damaged = tmp_path / "damaged.wav"
    damaged.write_bytes(b"RIFF" + bytes(40))
    with pytest.raises(InvalidRequest, match="Invalid data"):
        read_sound(damaged, 1)


def test_sound_stays_when_a_video_is_continued_from_its_own_file_again_and_again(tmp_path):
    noise = np.random.default_rng(0).normal(0, 0.1, (2, 44100)).astype(np.float32)
    whole, part = tmp_path / "whole.mp4", tmp_path / "part.mp4"

    def write(path):
        with VideoWriter(path, fps=FPS, overwrite=True) as writer:
            writer.set_audio(noise, 44100)
            writer.write(play())

    write(whole)
    first = listen(whole, 0, 0.95)
    for _ in range(4):
        write(part)
        join_videos([whole, part], whole)
    assert np.array_equal(listen(whole, 0, 0.95), first)
    # Each part begins with the packet that is nearest to its first frame.
    for index in range(1, 5):
        heard = listen(whole, index + 0.1, index + 0.2)[0]
        near = listen(part, 0.08, 0.22)[0]
        lag = np.correlate(near, heard, "valid").argmax() - round(0.02 * 44100)
        assert abs(lag) <= 512 + 2


def test_sound_that_some_other_program_put_beside_our_frames_is_encoded_again(tmp_path):
    plain, sound, path, joined = (tmp_path / f"{name}.mp4" for name in ("plain", "sound", "clip", "all"))
    write_own(plain)
    run("-f", "lavfi", "-i", f"sine={LEFT}:d=2:r=44100", "-ac", "2", "-c:a", "aac", sound)
    # The sound is cut between packets, as the file says, so it begins otherwise than ours does.
    run("-ss", "0.31", "-i", sound, "-i", plain, "-map", "1:v", "-map", "0:a", "-c", "copy", "-t", "1", path)
    join_videos([path, plain], joined)
    assert_tones(listen(joined, 0, 9), (LEFT, LEFT), 0.1, 0.9)
    assert read_clip(joined).is_even


def test_a_video_has_the_same_frames_at_another_rate_whoever_asks(tmp_path):
    path = tmp_path / "clip.mp4"
    KINDS["plain"].make(path)
    for rate in (5, 20):
        shown = play(*(index * FPS // rate for index in range(FRAMES * rate // FPS)))
        assert count_frames(path, rate) == len(shown)
        assert_shown(read_ends(path, 0, rate)[1:], shown, 0.7)
        source = prepare_source(path, tmp_path, Fit(HEIGHT, WIDTH), rate)
        assert_shown(read_frames(source, len(shown)), shown, 0.7 + LOSS)


@pytest.mark.parametrize("fps", kinds((16.1234, 7.12346, 29.97, 23.976), [16.1234]))
def test_a_video_of_any_rate_is_continued_without_encoding_it_again(fps, tmp_path):
    whole, part = tmp_path / "whole.mp4", tmp_path / "part.mp4"
    for path in (whole, part):
        with VideoWriter(path, fps=fps) as writer:
            writer.set_audio(np.zeros((2, 44100), np.float32), 44100)
            writer.write(play())
    for times in range(2, 5):
        join_videos([whole, part], whole)
        clip = read_clip(whole)
        assert (clip.frames, clip.is_even, clip.rate) == (times * FRAMES, True, exact_rate(fps))
        assert prepare_source(whole, tmp_path, Fit(HEIGHT, WIDTH), fps) == whole


def test_a_sound_that_ends_before_the_last_frames_is_none(tmp_path):
    path = tmp_path / "a.mp4"
    sources = ["-f", "lavfi", "-i", "testsrc=d=2:s=64x64:r=24", "-f", "lavfi", "-i", "sine=d=1.3"]
    run(*sources, "-c:v", "libx264", "-c:a", "aac", path)
    frames, sound = read_ending(path, fps=24, count=12)
    assert (len(frames), sound) == (12, None)
    frames, sound = read_ending(path, fps=24, count=24)
    assert len(frames) == 24 and sound is not None and 0 < sound[0].shape[1] < 0.5 * sound[1]
