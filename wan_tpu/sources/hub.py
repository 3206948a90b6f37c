"""Errors of the Hugging Face hub: a repository that it refuses is the caller's mistake, an outage is not."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
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
        if _is_permanent(error):
            raise CheckpointError(
                f"can't fetch {repository} from the Hugging Face hub ({reason}); "
                "check the id and the access token, or give a local path"
            ) from None
        raise Unavailable(
            f"can't fetch {repository} from the Hugging Face hub now ({reason}); "
            "check the network and try again, or give a local path"
        ) from None


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


def _is_permanent(error: BaseException | None) -> bool:
    if isinstance(error, LocalEntryNotFoundError):
        # The client looked into its cache after a failure, which is the cause; if it is offline, it names no cause.
        return _is_permanent(error.__cause__) or constants.is_offline_mode()
    if isinstance(error, HfHubHTTPError):
        return is_refusal(error.response.status_code)
    return isinstance(error, HFValidationError | OfflineModeIsEnabled)
