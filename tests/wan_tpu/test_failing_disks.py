"""A failing disk is nobody's fault; a file that is missing or damaged is the caller's."""

from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers

from wan_tpu.adapters import files, location
from wan_tpu.checkpoint import Checkpoint, on_disk
from wan_tpu.commands import staged
from wan_tpu.errors import CheckpointError, InvalidInput, InvalidRequest, Unavailable
from wan_tpu.families.shared.image_processing import ImageProcessor
from wan_tpu.families.shared.tokenizer import train_tokenizer
from wan_tpu.families.shared.tokenizing import Tokenizer, tokenize
from wan_tpu.identity import identify
from wan_tpu.media.image import load_image
from wan_tpu.media.reading import read_frames
from wan_tpu.runtime.tensor_files import Stored, locate_tensors
from wan_tpu.runtime.weights import read_tensors
from wan_tpu.storage.opening import open_storage

UNREADABLE = Path("/proc/self/mem")  # Linux answers EIO, as a failing disk does, when its first bytes are read.


def test_weights_on_a_failing_disk_are_unavailable(tmp_path):
    file = tmp_path / "model.safetensors"
    file.symlink_to(UNREADABLE)
    with pytest.raises(Unavailable):
        locate_tensors(on_disk(file))
    with pytest.raises(Unavailable):
        read_tensors({"a": Stored(str(file), 0, torch.float32, (4,))})
    with pytest.raises(Unavailable, match=r"adapter .*: .*model\.safetensors"):
        files.read(location.find(str(tmp_path)), str(tmp_path))


def test_configuration_on_a_failing_disk_is_unavailable(tmp_path):
    (tmp_path / "model_index.json").symlink_to(UNREADABLE)
    with pytest.raises(Unavailable, match=r"model_index\.json"):
        Checkpoint(tmp_path)


def test_settings_of_a_stage_on_a_failing_disk_are_unavailable(tmp_path):
    with pytest.raises(InvalidInput, match="wan-tpu stage1"):
        staged.denoise(["--input_dir", str(tmp_path)])
    (tmp_path / staged.CONFIG).symlink_to(UNREADABLE)
    with pytest.raises(Unavailable):
        staged.denoise(["--input_dir", str(tmp_path)])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer_on_a_failing_disk_is_unavailable(name, tmp_path):
    """The tokenizers package raises a bare Exception for it, as it does for a damaged file."""
    train_tokenizer().save_pretrained(tmp_path)
    tokenize(Tokenizer(tmp_path, 400), "a cat", 16)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(UNREADABLE)
    with pytest.raises(Unavailable):
        tokenize(Tokenizer(tmp_path, 400), "a cat", 16)
    (tmp_path / name).unlink()
    (tmp_path / name).write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer"):
        tokenize(Tokenizer(tmp_path, 400), "a cat", 16)


@pytest.mark.parametrize(
    ("kind", "shape"), [(transformers.CLIPImageProcessor, (3, 8, 8)), (transformers.SiglipImageProcessor, (3, 8, 8))]
)
def test_image_processor_says_what_is_wrong_with_its_file(kind, shape, tmp_path):
    file = tmp_path / "preprocessor_config.json"
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
        ImageProcessor(kind, tmp_path, shape).read()
    kind(size={"height": 8, "width": 8}, crop_size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    ImageProcessor(kind, tmp_path, shape).read()
    with pytest.raises(CheckpointError, match=r"\(3, 8, 8\).*\(3, 16, 16\)"):
        ImageProcessor(kind, tmp_path, (3, 16, 16)).read()
    for damaged in ("{", "[]", '{"size": 3.5}'):
        file.write_text(damaged)
        with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
            ImageProcessor(kind, tmp_path, shape).read()
    file.unlink()
    file.symlink_to(UNREADABLE)
    with pytest.raises(Unavailable, match=r"preprocessor_config\.json"):
        ImageProcessor(kind, tmp_path, shape).read()


def test_content_on_a_failing_disk_does_not_pass_for_unchanged(tmp_path, monkeypatch):
    file = tmp_path / "style.safetensors"
    file.write_bytes(b"weights")
    before = identify(str(file))
    file.unlink()
    file.symlink_to(UNREADABLE)
    for look in (before.check, lambda: identify(str(file)), lambda: identify(str(tmp_path))):
        with pytest.raises(Unavailable):
            look()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit = tmp_path / "models--someone--style" / "refs" / "main"
    commit.parent.mkdir(parents=True)
    commit.symlink_to(UNREADABLE)
    with pytest.raises(Unavailable):
        identify("someone/style")


def test_weights_that_are_missing_or_cut_off_are_the_callers(tmp_path):
    file = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match="is missing"):
        read_tensors({"a": Stored(str(file), 0, torch.float32, (4,))})
    file.write_bytes(bytes(8))
    with pytest.raises(CheckpointError, match=r"\b8 bytes.*\b16\b"):
        read_tensors({"a": Stored(str(file), 0, torch.float32, (4,))})


def test_inputs_on_a_failing_disk_are_not_the_requests_fault(tmp_path):
    file = tmp_path / "cat.png"
    file.symlink_to(UNREADABLE)
    with pytest.raises(Unavailable, match="image"):
        load_image(file)
    with pytest.raises(Unavailable, match="video"):
        read_frames(file, 1)
    with pytest.raises(InvalidRequest, match=r"none\.mp4"):
        read_frames(tmp_path / "none.mp4", 1)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("kill -KILL $$", Unavailable),
        ("echo '[h264 @ 0x5] pthread_create() failed: Resource temporarily unavailable' >&2; exit 245", Unavailable),
        ("exit 244", Unavailable),
        ("echo '[h264 @ 0x5] get_buffer() failed' >&2; exit 69", Unavailable),
        ("echo '[enc:libx264 @ 0x5] Error while opening encoder' >&2; exit 187", Unavailable),
        ("echo '[enc:mjpeg @ 0x5] Error while opening encoder' >&2; exit 234", InvalidRequest),  # It has 70000 columns.
        ("echo '    title   : Cannot allocate memory' >&2; exit 69", InvalidRequest),
        ("echo '    title   : Error while opening encoder' >&2; exit 69", InvalidRequest),
        ("kill -SEGV $$", InvalidRequest),
    ],
)
def test_how_ffmpeg_ends_says_whose_fault_it_is(how, kind, tmp_path, monkeypatch):
    """An operator or the kernel kills it or refuses it memory or threads; a damaged video makes it crash."""
    program, video = tmp_path / "ffmpeg", tmp_path / "a.mp4"
    program.write_text(f"#!/bin/sh\nulimit -c 0\n{how}\n")
    program.chmod(0o755)
    video.write_bytes(b"video")
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
    with pytest.raises(kind):
        read_frames(video, 1)


def test_result_that_cannot_be_written_blames_no_input():
    with pytest.raises(Exception, match="/proc/nothing/a") as raised:
        open_storage("/proc/nothing").write("a", b"")
    assert not isinstance(raised.value, InvalidInput)
