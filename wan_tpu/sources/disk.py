"""Errors of this machine's files: a missing file is the caller's mistake, a failing disk is not."""

import errno
from pathlib import Path

from wan_tpu.errors import CheckpointError, Unavailable

# Permanent errors, caused by the path or the file's permissions. All others may be temporary (EIO, ESTALE, ENOSPC,
# EMFILE, ...).
_PERMANENT = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}


def is_permanent(error: OSError) -> bool:
    """Return whether the path itself causes an error, so that the same call would fail again."""
    return error.errno in _PERMANENT


def explain_disk_error(error: OSError, path: str | Path) -> CheckpointError | Unavailable:
    """Return the exception that says whose fault it is that `path` can't be read."""
    reason = error.strerror or str(error)
    if error.errno in (errno.EACCES, errno.EPERM):
        return CheckpointError(f"{path} can't be read ({reason}); give the user that runs this permission to read it")
    if is_permanent(error):
        return CheckpointError(f"{path} is missing or can't be read ({reason}); fetch it again")
    return Unavailable(f"{path} can't be read now ({reason}); check the disk that it lies on, and try again")


def explain_unusable(
    error: Exception, path: Path, part: str, *, read_again: bool = True
) -> CheckpointError | Unavailable:
    """Return the exception that says whose fault it is that another library can't use files.

    Such libraries raise the same types for a damaged file as for a failing disk.

    Args:
        error: What the library raised.
        path: The file, or the folder of the files, that it reads.
        part: What the library should load from them, for people.
        read_again: Whether to read the files again, to find out whether the disk fails.
    """
    try:
        if isinstance(error, OSError) and error.errno is not None:  # transformers itself raises OSErrors without one.
            raise error
        if read_again:
            for file in path.iterdir() if path.is_dir() else [path]:
                if not file.is_dir():
                    file.read_bytes()
    except OSError as failure:
        return explain_disk_error(failure, path)
    reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    return CheckpointError(f"{path} doesn't hold a working {part} ({reason}); fetch it again")


def read_file(path: Path) -> bytes:
    """Return a file's content.

    Raises:
        CheckpointError: It isn't there, or this process may not read it.
        Unavailable: The disk or the machine fails.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise explain_disk_error(error, path) from None
