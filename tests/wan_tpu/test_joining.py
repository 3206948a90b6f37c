"""Videos that go on: the last frame, files joined with and without encoding again, and `generate --extend`."""

import json
import subprocess

import imageio.v3 as iio
import imageio_ffmpeg
import numpy as np
import pytest

from tests.wan_tpu.test_cli import REQUEST
from wan_tpu import GenerationRequest, InvalidRequest, cli
from wan_tpu.commands.generate import generate
from wan_tpu.errors import OutputError, Unavailable
from wan_tpu.media.joining import join_videos, read_clip
from wan_tpu.media.mp4 import Mp4
from wan_tpu.media.reading import read_frame, read_frames
from wan_tpu.media.video import VideoWriter
from wan_tpu.media.video_content import VideoContent

RATE = 24000
NOISE = np.random.default_rng(1).integers(0, 255, (32, 48, 3)).astype(np.uint8)


def write(path, frames, *, first=0, pitch=None, fps=8):
    """Write frames that move to the right, with a tone if there is a pitch."""
    with VideoWriter(path, fps=fps) as writer:
        if pitch is not None:
            times = np.arange(RATE * frames // fps) / RATE
            writer.set_audio(np.stack([np.sin(2 * np.pi * pitch * times)] * 2).astype(np.float32) / 2, RATE)
        writer.write(np.roll(NOISE, first + i, axis=1) for i in range(frames))
    return path


def packets(path):
    """Return size and digest of every packet of the frames."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", path, "-map", "0:v", "-c", "copy"]
    text = subprocess.run([*command, "-f", "framehash", "-"], capture_output=True, check=True, text=True).stdout
    return [line.split(",")[4:] for line in text.splitlines() if line[0] != "#"]


def sound(path):
    """Return the samples of a file's sound, float32 [n, 2]."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", path, "-map", "0:a", "-f", "f32le", "-"]
    return np.frombuffer(subprocess.run(command, capture_output=True, check=True).stdout, "<f4").reshape(-1, 2)


def frames(path):
    return iio.imread(path, plugin="FFMPEG")


def assert_pitches(path, ends, pitches):
    """Check that a file's sound has one pitch (None: silence) up to each of the ends, counted in frames of 1/8 s."""
    samples, start = sound(path)[:, 0], 0
    assert len(samples) == pytest.approx(RATE * ends[-1] / 8, abs=1024)
    for end, pitch in zip(ends, pitches, strict=True):
        # An encoder smears sound over a boundary by a few hundred samples, and the end of the file by a packet.
        stop = RATE * end // 8 - (480 if end < ends[-1] else 3000)
        part, start = samples[start + (480 if start else 0) : stop], RATE * end // 8
        loudest = np.argmax(np.abs(np.fft.rfft(part))) * RATE / len(part)
        assert loudest == pytest.approx(pitch, abs=3) if pitch is not None else np.abs(part).max() < 0.01


@pytest.mark.parametrize("pitches", [(None, None, None), (440, 880, 660), (None, 880, None)])
def test_packets_of_all_files_are_unchanged_and_sound_stays_in_step(pitches, tmp_path):
    lengths, ends = (9, 8, 6), (9, 17, 23)
    clips = [
        write(tmp_path / f"{end}.mp4", length, first=end - length, pitch=pitch)
        for length, end, pitch in zip(lengths, ends, pitches, strict=True)
    ]
    output = tmp_path / "it's: all.mp4"
    join_videos(clips, output)
    assert packets(output) == [packet for path in clips for packet in packets(path)]
    assert np.array_equal(frames(output), np.concatenate([frames(path) for path in clips]))
    clip = read_clip(output)
    assert (clip.frames, clip.rate, clip.is_even) == (23, 8, True)
    assert clip.sound == (("aac", RATE, "stereo") if any(pitches) else None)
    if any(pitches):
        assert_pitches(output, ends, pitches)


@pytest.mark.parametrize("pitches", [(440, None, None), (None, None, 660)])
def test_a_file_with_other_settings_is_converted_to_those_of_the_others(pitches, tmp_path):
    tone = [] if pitches[0] is None else ["-f", "lavfi", "-i", f"sine={pitches[0]}:d=2:r={RATE}", "-ac", "2"]
    other = make(tmp_path / "other.mkv", *tone, "-c:v", "mpeg4", source="testsrc=s=96x80:r=30:d=2")
    middle = write(tmp_path / "b.mp4", 8, pitch=pitches[1])
    last = write(tmp_path / "c.mp4", 8, first=20, pitch=pitches[2])
    join_videos([other, middle, last], tmp_path / "all.mp4")
    clip = read_clip(tmp_path / "all.mp4")
    assert (clip.size, clip.rate, clip.frames, clip.is_even) == ((48, 32), 8, 16 + 8 + 8, True)
    joined = frames(tmp_path / "all.mp4")
    for start, path in ((16, middle), (24, last)):
        assert np.array_equal(joined[start : start + 8], frames(path))
    assert packets(tmp_path / "all.mp4")[16:] == packets(middle) + packets(last)
    assert_pitches(tmp_path / "all.mp4", (16, 24, 32), pitches)
    again = write(tmp_path / "d.mp4", 4)
    join_videos([tmp_path / "all.mp4", again], tmp_path / "more.mp4")
    assert packets(tmp_path / "more.mp4") == packets(tmp_path / "all.mp4") + packets(again)


def make(path, *options, source="color=gray:s=48x32:r=30:d=1"):
    """Write a file that this program wouldn't."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-f", "lavfi", "-i", source, *options, path]
    subprocess.run(command, check=True)
    return path


def test_frames_that_begin_after_their_sound_stay_in_step(tmp_path):
    late = ["-f", "lavfi", "-i", "sine=440:d=1.5", "-vf", "setpts=PTS+0.5/TB"]
    source, segment = make(tmp_path / "late.mp4", *late), write(tmp_path / "b.mp4", 8, pitch=880)
    join_videos([source, segment], tmp_path / "both.mp4")
    clip = read_clip(tmp_path / "both.mp4")
    assert (clip.frames, clip.is_even, clip.rate) == (12 + 8, True, 8)
    assert_pitches(tmp_path / "both.mp4", (12, 20), (440, 880))


def test_a_disk_that_takes_no_files_isn_t_the_video_s_fault(tmp_path, monkeypatch):
    part = write(tmp_path / "a.mp4", 4)
    with pytest.raises(OutputError):
        join_videos([part, part], tmp_path / "elsewhere" / "both.mp4")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    with pytest.raises(Unavailable):
        read_frame(VideoContent(part.read_bytes()), 0)


def test_a_frame_is_found_by_its_number(tmp_path):
    source = write(tmp_path / "a.mp4", 9, pitch=440)
    frames = np.stack([np.asarray(frame, int) for frame in read_frames(source, 9)])
    for video in (source, VideoContent(source.read_bytes())):
        differences = np.abs(frames - np.asarray(read_frame(video, 8))).mean((1, 2, 3))
        assert differences[8] < np.delete(differences, 8).min() / 2
        with pytest.raises(InvalidRequest):
            read_frame(video, 9)


@pytest.mark.parametrize("content", [b"", b"no video", b"\0" * 5000])
def test_what_is_no_video_is_refused(content, tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(content)
    for read in (lambda path: read_frame(path, 0), read_clip):
        with pytest.raises(InvalidRequest):
            read(path)
    with pytest.raises(InvalidRequest):
        join_videos([path, path], tmp_path / "b.mp4")
    assert not (tmp_path / "b.mp4").exists()


def test_hidden_frames_aren_t_written_nor_is_their_sound(tmp_path):
    pixels = np.stack([np.roll(NOISE, i, axis=1) for i in range(9)])
    tone = np.stack([np.sin(np.arange(RATE * 9 // 8) / 9)] * 2).astype(np.float32)
    with Mp4(8, hidden_frames=5) as mp4:
        mp4.set_audio(tone, RATE)
        for chunk in (pixels[:1], pixels[1:5], pixels[5:]):
            mp4.add(chunk[..., [1, 2, 0]].transpose(0, 3, 1, 2))
        mp4.finish()
    assert np.array_equal(mp4.last_frame, pixels[-1])
    (tmp_path / "a.mp4").write_bytes(mp4.content)
    write(tmp_path / "b.mp4", 4, first=5)
    assert packets(tmp_path / "a.mp4") == packets(tmp_path / "b.mp4")
    assert len(sound(tmp_path / "a.mp4")) == pytest.approx(RATE // 2, abs=1024)


def test_a_video_in_memory_says_what_it_has(tmp_path):
    content = VideoContent(write(tmp_path / "a.mp4", 9).read_bytes())
    with pytest.raises(InvalidRequest, match=r"\b9 frames.*\b6\b"):
        read_frames(content, 10, step=4)
    request = GenerationRequest(prompt="x", video=content)
    assert json.loads(json.dumps(request.to_json()))["video"] == str(content)


def list_arguments():
    """Return the arguments of a request of one step without an image and a size."""
    bare = [word for i, word in enumerate(REQUEST) if "--image" not in REQUEST[max(0, i - 1) : i + 1]]
    sized = [word for i, word in enumerate(bare) if "--size" not in bare[max(0, i - 1) : i + 1]]
    return [*sized, "--steps", "1", "--guidance_scale", "1"]


def test_generate_extends_a_file(checkpoint, tmp_path, capsys):
    source, out = write(tmp_path / "a.mp4", 9), tmp_path / "whole.mp4"
    model = ["--model_id", str(checkpoint("wan2.2-i2v-a14b")), "--output", str(out)]
    bare = list_arguments()
    assert cli.run(generate, [*model, *REQUEST, "--extend", str(source)]) == 2
    assert "leave --image out" in capsys.readouterr().err
    assert cli.run(generate, [*model, *bare, "--extend", str(source)]) == 0
    assert packets(out)[:9] == packets(source)
    assert len(packets(out)) == 9 + 5 - 1  # The segment's first frame is the source's last one.
    record = json.loads(out.with_suffix(".json").read_text())["request"]
    assert record["image"] == f"the last frame of {source}, 48x32" and record["hidden_frames"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mp4", "whole.json", "whole.mp4", "whole.sheet.png"]
    assert cli.run(generate, [*model, *bare, "--extend", str(source), "--frames", "1", "--overwrite"]) == 2
    assert "give at least 5" in capsys.readouterr().err
    text_only = ["--model_id", str(checkpoint("wan2.2-t2v-a14b")), "--output", str(tmp_path / "b.mp4")]
    assert cli.run(generate, [*text_only, *bare, "--extend", str(source)]) == 2
    assert "use an I2V checkpoint" in capsys.readouterr().err


@pytest.mark.long
def test_what_is_generated_is_kept_if_it_cant_be_joined(checkpoint, tmp_path, monkeypatch, capsys):
    plain, source, out = write(tmp_path / "plain.mp4", 9), tmp_path / "a.mp4", tmp_path / "whole.mp4"
    plain.rename(source)

    def join(clips, output):
        clips[0].unlink()  # Somebody deletes the video while it is being continued.
        join_videos(clips, output)

    monkeypatch.setattr("wan_tpu.commands.generate.join_videos", join)
    model = ["--model_id", str(checkpoint("wan2.2-i2v-a14b")), "--output", str(out)]
    assert cli.run(generate, [*model, *list_arguments(), "--extend", str(source)]) != 0
    part = tmp_path / "whole.new.mp4"
    assert str(part) in capsys.readouterr().err
    assert read_clip(part).frames == 5 - 1
    names = ["whole.json", "whole.new.mp4", "whole.sheet.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
