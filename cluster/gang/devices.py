"""Whether a TPU host's chips are free for a new process: who had them may not be gone yet, and a lock may be left."""

import contextlib
import glob
import os
import time
from collections.abc import Sequence
from pathlib import Path

from cluster.errors import ChipsBusy

DEVICES = ("/dev/vfio/[0-9]*", "/dev/accel*")  # of chips: newer generations, older ones
LOCKFILE = "/tmp/libtpu_lockfile"  # libtpu's, which one that was killed leaves behind
POLL_S = 0.1


def wait_for_chips(timeout_s: float, devices: Sequence[str] = DEVICES, lockfile: str = LOCKFILE) -> None:
    """Return when no other process has a chip open, and remove the lock that one of them has left.

    Call it before JAX is imported: libtpu would fail, and JAX go on on the CPU. Raises `ChipsBusy` with who has one.
    """
    until = time.monotonic() + timeout_s
    while holders := _holders({os.path.realpath(path) for pattern in devices for path in glob.glob(pattern)}):
        if time.monotonic() > until:
            pid, path = next(iter(holders.items()))
            raise ChipsBusy(f"process {pid} ({_command(pid)}) has {path} still, {timeout_s:g} s on; end it")
        time.sleep(POLL_S)
    if not _holders({os.path.realpath(lockfile)}):
        with contextlib.suppress(OSError):  # there is none, or another user's
            os.unlink(lockfile)


def _holders(paths: set[str]) -> dict[int, str]:
    """Return the other processes that have one of these files open, and which. Those of other users aren't seen."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*/fd"):
        pid = int(folder.parent.name)
        if pid != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                held = paths & {os.readlink(file) for file in folder.iterdir()}
                found |= dict.fromkeys([pid], min(held)) if held else {}
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return " ".join(word.decode(errors="replace") for word in words if word)[:100]
    return "ended meanwhile"
