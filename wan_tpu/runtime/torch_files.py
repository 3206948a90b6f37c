"""Which tensors a file of torch.save holds, and where, without reading any."""

import zipfile

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from wan_tpu.errors import CheckpointError, Unavailable
from wan_tpu.runtime.tensor_files import Stored, refuse_other_content
from wan_tpu.sources.disk import explain_disk_error
from wan_tpu.storage.folder import WeightFile

SUFFIXES = (".pth", ".pt")


def torch_tensors(file: WeightFile) -> dict[str, Stored]:
    """Return the tensors of a file of this machine by name.

    It may be a dictionary of tensors, or have one as its "state_dict". Nothing but tensors is unpickled.

    Raises:
        CheckpointError: It is damaged, holds something else, or a tensor doesn't lie in one piece.
        Unavailable: The disk or this machine fails: the file may be whole.
    """
    file.read(0, 1)  # which says whose fault it is where nothing can be read; `is_zipfile` says "no" then
    try:
        if not zipfile.is_zipfile(file.address):
            refuse_other_content(file)
            raise CheckpointError(f"{file.address} is no file of torch.save (since 1.6), or cut off; fetch it again")
        with zipfile.ZipFile(file.address) as archive:
            if any(one.compress_type != zipfile.ZIP_STORED for one in archive.infolist()):
                raise CheckpointError(f"{file.address} was packed by something else than torch.save; fetch it again")
        with FakeTensorMode():  # by which torch.load tells where storages lie, in place of reading them
            found = torch.load(file.address, weights_only=True, map_location="cpu")
    except CheckpointError:
        raise
    except OSError as error:
        raise explain_disk_error(error, file.address) from None
    except MemoryError as error:
        raise Unavailable(f"{file.address} can't be read now: this machine has no memory left ({error})") from None
    except Exception as error:  # whatever a damaged pickle makes of it
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{file.address} can't be read as weights alone ({reason})") from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise CheckpointError(f"{file.address} holds no dictionary of tensors; give what a model's state_dict() saved")
    return {name: _stored(file, name, tensor) for name, tensor in found.items()}


def _stored(file: WeightFile, name: str, tensor: torch.Tensor) -> Stored:
    if not tensor.is_contiguous():
        raise CheckpointError(f"{file.address} has {name} in several pieces; save it again with contiguous()")
    start = tensor.untyped_storage()._checkpoint_offset
    return Stored(file.address, start + tensor.storage_offset() * tensor.dtype.itemsize, tensor.dtype, (*tensor.shape,))
