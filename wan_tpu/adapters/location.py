"""Where an adapter's file is: on disk, in a bucket or on the Hugging Face hub."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

import huggingface_hub
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from wan_tpu.checkpoint import on_disk
from wan_tpu.errors import CheckpointError, InvalidRequest, Unavailable
from wan_tpu.sources.disk import explain_disk_error
from wan_tpu.sources.hub import explain_hub_errors
from wan_tpu.storage.addresses import is_bucket
from wan_tpu.storage.folder import BucketFolder, WeightFile

PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # Peft always saves both.
_ENDING = ".safetensors"
T = TypeVar("T")


class AdapterFile(NamedTuple):
    """An adapter's weights, and the adapter_config.json that belongs to them, if there is one."""

    weights: WeightFile
    config: WeightFile | None

    @property
    def version(self) -> str:
        """A string that changes whenever either file does."""
        return " ".join(file.version for file in self if file is not None)


def find(path: str) -> AdapterFile:
    """Find the file that an adapter's path refers to.

    Raises:
        InvalidRequest: There is none, or more than one.
        Unavailable: The bucket, the hub or the disk doesn't answer; the request may still be valid.
    """
    with attribute_errors(path):
        if is_bucket(path):
            return _find_in_bucket(path)
        local = Path(path)
        if local.is_dir():
            return _find_on_disk(_pick_only({file.name: file for file in sorted(local.glob(f"*{_ENDING}"))}))
        if local.is_file():
            return _find_on_disk(local)
        return _fetch_from_hub(path)


def check_unchanged(file: AdapterFile) -> None:
    """Raise `Unavailable` if a file was replaced since `find` returned it: the content read may mix old and new."""
    address = file.weights.address
    try:
        if is_bucket(address):
            version = _find_in_bucket(address).version
        else:
            version = " ".join(on_disk(Path(part.address)).version for part in file if part is not None)
    except CheckpointError:  # The file is gone.
        version = None
    if version != file.version:
        raise Unavailable("it was replaced while it was read; try again")


@contextlib.contextmanager
def attribute_errors(path: str) -> Iterator[None]:
    """Name the adapter in the block's errors: `InvalidRequest` if its file is at fault, otherwise `Unavailable`."""
    try:
        yield
    except CheckpointError as error:
        raise InvalidRequest(f"adapter {path}: {error}", "loras") from None
    except Unavailable as error:
        raise Unavailable(f"adapter {path}: {error}") from None
    except OSError as error:
        explanation = explain_disk_error(error, path)
        if isinstance(explanation, Unavailable):
            raise explanation from None
        raise InvalidRequest(f"adapter {path} can't be read ({error.strerror or error})", "loras") from None


def _pick_only(files: Mapping[str, T]) -> T:
    """Return the only file; raises `CheckpointError` if there are none or several."""
    if len(files) == 1:
        return next(iter(files.values()))
    if files:
        raise CheckpointError(f"the folder has {', '.join(sorted(files)[:8])}; choose one of them")
    raise CheckpointError(f"there is no {_ENDING} file; give one, a folder with one, or OWNER/NAME[/FILE] of the hub")


def _find_in_bucket(path: str) -> AdapterFile:
    folder, _, name = path.rpartition("/")
    if not name.endswith(_ENDING):
        folder, name = path, ""
    objects = BucketFolder(folder).files()
    files = {other: file for other, file in objects.items() if other.endswith(_ENDING) and name in ("", other)}
    return AdapterFile(_pick_only(files), objects.get(PEFT_CONFIG))


def _find_on_disk(path: Path) -> AdapterFile:
    config = path.with_name(PEFT_CONFIG)
    return AdapterFile(on_disk(path), on_disk(config) if config.is_file() else None)


def _fetch_from_hub(path: str) -> AdapterFile:
    """Fetch a file of the hub: OWNER/NAME/FILE, or the only adapter of OWNER/NAME."""
    owner, _, rest = path.partition("/")
    name, _, file = rest.partition("/")
    missing = CheckpointError("it is neither a file on this machine nor OWNER/NAME[/FILE] on the hub; check the path")
    if not owner or not name or path.startswith((".", "/", "~")):
        raise missing
    repository = f"{owner}/{name}"
    try:
        validate_repo_id(repository)
    except HFValidationError:
        raise missing from None
    with explain_hub_errors(repository):
        if not file:
            names = [name for name in huggingface_hub.list_repo_files(repository) if name.endswith(_ENDING)]
            if len(names) != 1:
                raise CheckpointError(
                    f"the repository has {', '.join(names[:8]) or 'no such file'}; choose one of them"
                )
            file = names[0]
        weights = Path(huggingface_hub.hf_hub_download(repository, file))
        # The repository's other files are ignored, because hosts have different ones in their caches.
        config = None
        if PurePosixPath(file).name == PEFT_FILE:
            commit = weights.parents[len(PurePosixPath(file).parents) - 1].name  # .../snapshots/COMMIT/FILE
            beside = str(PurePosixPath(file).with_name(PEFT_CONFIG))
            with contextlib.suppress(RemoteEntryNotFoundError):  # Other programs use this file name, too.
                config = on_disk(Path(huggingface_hub.hf_hub_download(repository, beside, revision=commit)))
    return AdapterFile(on_disk(weights), config)
