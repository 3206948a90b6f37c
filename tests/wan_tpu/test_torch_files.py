"""Files of torch.save: what is wrong with one is its owner's, what is wrong with this machine is nobody's."""

import resource
import zipfile
from pathlib import Path

import pytest
import torch

from wan_tpu.checkpoint import on_disk
from wan_tpu.errors import CheckpointError, Unavailable
from wan_tpu.runtime.torch_files import locate_torch_tensors

UNREADABLE = Path("/proc/self/mem")  # Linux answers EIO, as a failing disk does, when its first bytes are read.


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.pth"
    torch.save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, path)
    return path


def test_tensors_lie_where_they_are_said_to(file):
    stored = locate_torch_tensors(on_disk(file))
    assert (stored["a"].shape, stored["b"].kind) == ((2, 3), torch.bfloat16)
    content = file.read_bytes()[stored["a"].offset :][:24]
    assert torch.frombuffer(bytearray(content), dtype=torch.float32).tolist() == list(range(6))


def test_file_on_a_failing_disk_is_unavailable(tmp_path):
    (tmp_path / "model.pth").symlink_to(UNREADABLE)
    with pytest.raises(Unavailable, match=r"model\.pth"):
        locate_torch_tensors(on_disk(tmp_path / "model.pth"))


def test_machine_without_file_descriptors_is_to_blame_itself(file):
    weights, before = on_disk(file), resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = next(number for number in range(before[0]) if not Path(f"/proc/self/fd/{number}").exists())
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        with pytest.raises(Unavailable):
            locate_torch_tensors(weights)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_damaged_files_are_the_callers(file):
    content = file.read_bytes()
    file.write_bytes(content[:-200])
    with pytest.raises(CheckpointError):
        locate_torch_tensors(on_disk(file))
    directory = content.index(b"PK\x01\x02")  # where the archive's list of its files begins
    file.write_bytes(content[:directory] + b"XX" + content[directory + 2 :])
    with pytest.raises(CheckpointError):
        locate_torch_tensors(on_disk(file))
    with zipfile.ZipFile(file, "w") as other:
        other.writestr("readme", "no weights")
    with pytest.raises(CheckpointError):
        locate_torch_tensors(on_disk(file))
