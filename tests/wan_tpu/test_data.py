"""What crosses a stage boundary comes back as it went; results are written whole or not at all."""

from pathlib import Path

import imageio.v3 as iio
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from wan_tpu import Conditioning, DenoiseState, InvalidInput, OutputError, UnhealthyResult, Video
from wan_tpu.data import dump_value, flatten, load_value, parse_value, save_value
from wan_tpu.media.sheet import fill_rows, frame_label
from wan_tpu.media.video import ContactSheet, check_output
from wan_tpu.runtime.health import ColourRange, check_finite

RNG = np.random.default_rng(0)


def test_bfloat16_round_trips_without_loss(tmp_path):
    every_pattern = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(1, 256, 256)
    save_value(
        Conditioning(prompt={"text": every_pattern}, image=RNG.standard_normal((1, 3, 4))), tmp_path / "c.safetensors"
    )
    got, _ = load_value(Conditioning, tmp_path / "c.safetensors")
    assert got.prompt["text"].dtype == ml_dtypes.bfloat16
    assert np.array_equal(got.prompt["text"].view(np.uint16), every_pattern.view(np.uint16))
    assert got.negative is None
    assert got.image.dtype == np.float64


def test_an_older_version_s_embeddings_are_refused(tmp_path):
    path = tmp_path / "c.safetensors"
    metadata = {"type": "Conditioning", "notes": "{}"}
    safetensors.numpy.save_file({"prompt": np.zeros((1, 4, 8), np.float32)}, path, metadata=metadata)
    with pytest.raises(InvalidInput, match=r"older version wrote it.*run the stage that writes it again"):
        load_value(Conditioning, path)


def test_state_round_trips_with_its_history(tmp_path):
    terms = tuple(RNG.standard_normal((1, 2, 3, 4, 5)).astype(np.float32) for _ in range(4))
    save_value(DenoiseState(terms[0], terms[1:], 7), tmp_path / "s.safetensors", {"seed": 3})
    got, notes = load_value(DenoiseState, tmp_path / "s.safetensors")
    assert notes == {"seed": 3}
    assert got.step == 7
    for a, b in zip((got.latents, *got.history), terms, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("own_noise", [False, True])
def test_file_of_a_state_says_whether_its_noise_was_the_caller_s(own_noise):
    content = dump_value(DenoiseState(np.zeros((1, 1), np.float32), own_noise=own_noise))
    assert (b"own_noise" in content) == own_noise  # Without it, files stay as earlier versions wrote them.
    state, _ = parse_value(DenoiseState, content, "a snapshot")
    assert state.own_noise is own_noise


def test_what_only_a_later_version_knows_is_left_out(tmp_path):
    path = tmp_path / "s.safetensors"
    tensors = flatten(DenoiseState(np.ones((1, 2), np.float32), step=3)) | {"later": np.zeros(1), "more.0": np.zeros(1)}
    safetensors.numpy.save_file(tensors, path, metadata={"type": "DenoiseState", "notes": "{}"})
    state, _ = load_value(DenoiseState, path)
    assert state.step == 3 and np.array_equal(state.latents, tensors["latents"])


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "s.safetensors"
    with pytest.raises(InvalidInput, match="is missing; run the stage"):
        load_value(DenoiseState, path)
    save_value(DenoiseState(np.zeros((1, 1), np.float32)), path)
    with pytest.raises(InvalidInput, match=r"DenoiseState.*Conditioning"):
        load_value(Conditioning, path)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InvalidInput, match="damaged"):
        load_value(DenoiseState, path)


def moving_square():
    pixels = np.zeros((9, 64, 96, 3), np.float32)
    for t in range(9):
        pixels[t, 16:48, 4 + 6 * t : 36 + 6 * t] = (1.0, 0.5, 0.0)
    return Video(pixels=pixels, fps=8)


def test_video_is_h264_yuv420p_and_looks_the_same(tmp_path):
    video = moving_square()
    path = video.save(tmp_path / "video.mp4")
    meta = iio.immeta(path, plugin="FFMPEG")
    assert meta["codec"] == "h264"
    assert "yuv420p" in meta["pix_fmt"]
    assert meta["fps"] == 8
    assert meta["size"] == (96, 64)
    frames = iio.imread(path, plugin="FFMPEG")
    assert frames.shape == video.frames.shape
    assert np.abs(frames.astype(int) - video.frames).mean() < 6  # lossy, chroma at half resolution
    assert video.frames.dtype == np.uint8
    assert [p.name for p in tmp_path.iterdir()] == ["video.mp4"]


@pytest.mark.parametrize("name", ["video.png", "video", "."])
def test_only_mp4_is_written(tmp_path, name):
    with pytest.raises(OutputError, match=r"\.mp4"):
        moving_square().save(tmp_path / name)


def test_colons_in_a_relative_path_are_no_protocol(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    moving_square().save("cat-12:30.mp4")
    assert (tmp_path / "cat-12:30.mp4").stat().st_size > 500


def test_nothing_is_overwritten_unless_asked(tmp_path):
    video, path = moving_square(), tmp_path / "video.mp4"
    path.write_text("mine")
    with pytest.raises(OutputError, match=r"video\.mp4"):
        video.save(path)
    assert path.read_text() == "mine"
    video.save(path, overwrite=True)
    assert path.stat().st_size > 500


def test_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        check_output(tmp_path / "file" / "video.mp4", overwrite=False)


@pytest.mark.parametrize("link", [Path.hardlink_to, Path.symlink_to, None])
def test_no_input_is_written_over_by_any_name(tmp_path, link):
    image = tmp_path / "cat.png"
    image.write_text("mine")
    output = image if link is None else tmp_path / "output.png"
    if link is not None:
        link(output, image)
    for inputs in ((image,), ("no/hub-id", tmp_path)):
        with pytest.raises(OutputError, match="input"):
            check_output(output, overwrite=True, inputs=inputs)
    assert check_output(tmp_path / "other.png", overwrite=True, inputs=(image, None)).parent == tmp_path


def test_missing_ffmpeg_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "none"))
    with pytest.raises(OutputError, match="imageio-ffmpeg"):
        moving_square().save(tmp_path / "video.mp4")


def test_contact_sheet_shows_first_and_last_frame_with_their_numbers_and_no_empty_cell(tmp_path):
    frames = moving_square().frames
    sheet = ContactSheet(len(frames), fps=16)
    sheet.add(frames[:1])
    sheet.add(frames[1:])
    image = np.asarray(Image.open(sheet.save(tmp_path / "sheet.png")))
    tall, wide = 3 * 64, 3 * 96  # enlarged to be at least 240 wide
    assert image.shape == (8 + 2 * (tall + 22 + 8), 8 + 4 * (wide + 8), 3)
    assert np.array_equal(image[8 : 8 + tall : 3, 8 : 8 + wide : 3], frames[0])
    assert np.array_equal(image[-30 - tall : -30 : 3, -8 - wide : -8 : 3], frames[-1])
    texts = image[8 + tall : 30 + tall, 8 : 8 + wide], image[-30:-8, -8 - wide : -8]
    assert all(text.min() < 64 for text in texts) and not np.array_equal(*texts)
    assert (frame_label(0, 16), frame_label(80, 16)) == ("frame 1, 0.00 s", "frame 81, 5.00 s")


@pytest.mark.parametrize("total", [1, 2, 5, 9, 11, 12, 81])
def test_sheets_have_full_rows_from_the_first_frame_to_the_last(total):
    indices = fill_rows(total, 12)
    assert indices == sorted(set(indices)) and (indices[0], indices[-1]) == (0, total - 1)
    assert len(indices) == min(total, 12) // 4 * 4 if total >= 4 else len(indices) == total


@pytest.mark.parametrize("colour", [0.0, 1.0, 0.5])
def test_single_colour_is_unhealthy(colour):
    colours = ColourRange()
    colours.add(np.full((4, 8, 8, 3), colour, np.float32))
    colours.add(np.full((4, 8, 8, 3), colour + 0.001, np.float32))
    with pytest.raises(UnhealthyResult):
        colours.check()
    colours.add(np.full((1, 8, 8, 3), abs(colour - 0.1), np.float32))
    colours.check()


def test_nan_is_named():
    with pytest.raises(UnhealthyResult, match=r"denoise_low.* 7"):
        check_finite(np.array([1, np.nan], ml_dtypes.bfloat16), "denoise_low, step 7")
