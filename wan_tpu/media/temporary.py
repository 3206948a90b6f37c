"""Folders for temporary files. Those of killed processes are removed when the next folder is opened beside them."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = ".wan-tpu.temporary."


@contextlib.contextmanager
def open_folder(parent: Path | None = None) -> Iterator[Path]:
    """Open a folder for temporary files, which is removed at the end of the block; raises `OSError`.

    It is made in `parent`, by default in the system's folder for temporary files.
    """
    parent = parent or Path(tempfile.gettempdir())
    _remove_leftovers(parent)
    folder, lock = _make_folder(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make_folder(parent: Path) -> tuple[Path, int]:
    """Make a folder, and return it with the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=_PREFIX))
        # Until it is locked, another process may take it for a leftover and remove it.
        with contextlib.suppress(FileNotFoundError):
            lock = _open(folder)
            if _try_lock(lock) is not False and folder.exists():
                return folder, lock
            os.close(lock)


def _remove_leftovers(parent: Path) -> None:
    """Remove the folders of processes that were killed: they are this user's, and nobody holds their locks."""
    with os.scandir(parent) as entries:
        leftovers = [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
    for folder in map(Path, leftovers):
        with contextlib.suppress(OSError):  # It is another user's, or has been removed meanwhile.
            lock = _open(folder)
            if _try_lock(lock) and os.fstat(lock).st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _try_lock(descriptor: int) -> bool | None:
    """Lock a folder until its descriptor is closed, if only by the end of the process.

    Returns:
        Whether it is locked now; None where locks aren't supported, as on some network file systems. Leftovers stay
        there, because they can't be told from folders in use.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
