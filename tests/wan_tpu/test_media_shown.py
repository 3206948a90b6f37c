"""One reader of videos: every way in gets the frames that are shown, and they are the ones that were painted."""

import numpy as np
import pytest

from tests.wan_tpu import shown_clips
from tests.wan_tpu.shown_clips import FPS, KINDS
from wan_tpu.media.joining import join_videos, prepare_source
from wan_tpu.media.reading import count_frames, open_video, read_ends, read_frame, read_frames
from wan_tpu.media.shown import Fit
from wan_tpu.media.video import VideoWriter
from wan_tpu.media.video_content import VideoContent

LOSS = 0.6  # What encoding at crf 17 may move a frame's mean by.


@pytest.fixture(params=KINDS)
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


def test_every_way_in_gets_the_frames_that_are_shown(clip, tmp_path):
    path, shown, tolerance = clip
    count, height, width = shown.shape[:3]
    content = VideoContent(path.read_bytes())
    for video in (path, content):
        with open_video(video) as opened:
            assert (opened.height, opened.width, opened.count_frames()) == (height, width, count)
        assert_shown(read_frames(video, count), shown, tolerance)
        assert_shown([read_frame(video, count - 1)], shown[-1:], tolerance)
        assert count_frames(video, FPS) == count
        assert_shown(read_ends(video, count - 3, FPS), shown[[0, -3, -2, -1]], tolerance)


def test_a_video_of_every_kind_is_continued(clip, tmp_path):
    path, shown, tolerance = clip
    count, height, width = shown.shape[:3]
    source = prepare_source(path, tmp_path, Fit(height, width), FPS)
    last = read_frame(source, count - 1)
    assert_shown([last], shown[-1:], tolerance + LOSS)
    part, joined = tmp_path / "part.mp4", tmp_path / "all.mp4"
    with VideoWriter(part, fps=FPS) as writer:
        writer.write(np.stack([np.asarray(last)] * 4))
    join_videos([source, part], joined)
    whole = np.concatenate([shown, np.stack([shown[-1]] * 4)])
    assert_shown(read_frames(joined, count + 4), whole, tolerance + LOSS)


STILL = shown_clips.paint(3)


def test_colours_stay_when_a_video_is_continued_from_its_own_file_again_and_again(tmp_path):
    noise = np.random.default_rng(3).normal(0, 12, (6, 9, 1)).repeat(8, 0).repeat(8, 1)
    still = np.clip(STILL + noise, 0, 255).astype(np.uint8)
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
    last = np.asarray(read_frame(whole, 43), float)
    assert np.abs((last - still).mean((0, 1))).max() <= 0.5
    assert np.abs(last - still).mean() <= 2.5
