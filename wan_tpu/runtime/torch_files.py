"""Locate the tensors of a file written by torch.save without reading their values."""

import zipfile

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from wan_tpu.errors import CheckpointError, Unavailable
from wan_tpu.runtime.tensor_files import Stored, refuse_other_content
from wan_tpu.sources.disk import explain_disk_error
from wan_tpu.storage.folder import WeightFile

SUFFIXES = (".pth", ".pt")


def locate_torch_tensors(file: WeightFile) -> dict[str, Stored]:
    """Return where the tensors of a file on this machine are, by name.

    The file may be a dictionary of tensors, or have one as its "state_dict". Nothing but tensors is unpickled.

    Raises:
        CheckpointError: The file is damaged or holds something else, or a tensor isn't contiguous.
        Unavailable: The disk or this machine fails; the file may be intact.
    """
    # If nothing can be read, this raises an error that says why, whereas `is_zipfile` would return False.
    file.read(0, 1)
    try:
        if not zipfile.is_zipfile(file.address):
            refuse_other_content(file)
            raise CheckpointError(
                f"{file.address} is cut off, or isn't a file of torch.save (1.6 or later); fetch it again"
            )
        with zipfile.ZipFile(file.address) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise CheckpointError(f"{file.address} wasn't written by torch.save; fetch it again")
        # In this mode torch.load returns the offsets of storages instead of reading them.
        with FakeTensorMode():
            content = torch.load(file.address, weights_only=True, map_location="cpu")
    except CheckpointError:
        raise
    except OSError as error:
        raise explain_disk_error(error, file.address) from None
    except MemoryError as error:
        raise Unavailable(f"{file.address} can't be read now: this machine has no memory left ({error})") from None
    except Exception as error:  # A damaged pickle can raise anything.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{file.address} can't be read without running code that it holds ({reason}); save it "
            "again as plain tensors"
        ) from None
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise CheckpointError(f"{file.address} holds no dictionary of tensors; give what a model's state_dict() saved")
    return {name: _locate(file, name, tensor) for name, tensor in content.items()}


def _locate(file: WeightFile, name: str, tensor: torch.Tensor) -> Stored:
    if not tensor.is_contiguous():
        raise CheckpointError(f"{file.address} has a non-contiguous tensor {name}; save it again with contiguous()")
    start = tensor.untyped_storage()._checkpoint_offset
    return Stored(file.address, start + tensor.storage_offset() * tensor.dtype.itemsize, tensor.dtype, (*tensor.shape,))
