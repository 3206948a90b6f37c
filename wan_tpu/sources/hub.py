"""Errors of the Hugging Face hub: a repository that it refuses is the caller's mistake, an outage is not."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from wan_tpu.errors import CheckpointError, Unavailable
from wan_tpu.sources.statuses import is_refusal


@contextlib.contextmanager
def explain_hub_errors(repository: str) -> Iterator[None]:
    """Turn what the hub's client raises in the block into errors of this package.

    Args:
        repository: The id of what is fetched, for messages.

    Raises:
        CheckpointError: The hub has no such repository or file, doesn't let this account read it, or this process must
            stay offline (HF_HUB_OFFLINE).
        Unavailable: The hub, the network on the way to it, or the disk that keeps the files fails.
    """
    try:
        yield
    # RuntimeError is what hf_xet, the hub's downloader for large files, raises when a transfer fails.
    except (HFValidationError, HTTPError, OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = _advise(error, repository)
        if _is_permanent(error):
            message = f"can't fetch {repository} from the Hugging Face hub ({reason}); {remedy}, or give a local path"
            raise CheckpointError(message) from None
        message = f"can't fetch {repository} from the Hugging Face hub now ({reason}); {remedy}, or give a local path"
        raise Unavailable(message) from None


def advise_on_download(folder: Path) -> str | None:
    """Return what to do if a file is missing from a folder that hf download has filled; None for other folders."""
    own = folder / ".cache" / "huggingface"  # With --local-dir. Otherwise the folder is one of the hub's cache.
    state = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else own
    if not state.is_dir():
        return None
    interrupted = sum(1 for _ in state.rglob("*.incomplete"))
    reason = f" ({interrupted} files were interrupted)" if interrupted else ""
    return f"its download isn't complete{reason}: run the same `hf download` again, which fetches what is missing"


def explain_missing_index(source: str, folder: Path, *, is_hub: bool) -> CheckpointError:
    """Return the exception for a source without a model_index.json; it says where to find one that has it."""
    if not is_hub and (advice := advise_on_download(folder)) is not None:
        return CheckpointError(f"{source} has no model_index.json: {advice}")
    advice = (
        "give a folder in diffusers' format, or a hub id; single files and models in their authors' own "
        "formats can't be read"
    )
    if is_hub:
        name = source.partition("/")[2]
        advice = (
            "it isn't in diffusers' format; give a repository of the same model that is: "
            f"https://huggingface.co/models?search={name}-Diffusers lists them"
        )
    return CheckpointError(f"{source} has no model_index.json: {advice}")


def _advise(error: BaseException, repository: str) -> str:
    """Return what to do about an error of the hub's client."""
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        return _advise(error.__cause__, repository)
    match error:
        case GatedRepoError():
            return f"accept its conditions at https://huggingface.co/{repository}, and log in with `hf auth login`"
        case RepositoryNotFoundError():
            return "check the id; if the repository is private, log in with `hf auth login`"
        case OfflineModeIsEnabled() | LocalEntryNotFoundError() if constants.is_offline_mode():
            return "unset HF_HUB_OFFLINE"
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return "free some space, or set HF_HOME to a folder on another disk"
    return "check the id and the access token" if _is_permanent(error) else "check the network and try again"


def _is_permanent(error: BaseException | None) -> bool:
    if isinstance(error, LocalEntryNotFoundError):
        # The client looked into its cache after a failure, which is the cause; if it is offline, it names no cause.
        return _is_permanent(error.__cause__) or constants.is_offline_mode()
    if isinstance(error, HfHubHTTPError):
        return is_refusal(error.response.status_code)
    return isinstance(error, HFValidationError | OfflineModeIsEnabled)
