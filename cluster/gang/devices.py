"""Wait until a TPU host's chips are free for a new process, and explain why JAX can't start on them.

The process that used them before may still be ending, or may have left a lock behind.
"""

import contextlib
import glob
import os
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from cluster.errors import ChipsBusy, OtherHostGone, SliceError, WrongHost
from cluster.gang.protocol import DeviceError

DEVICES = ("/dev/vfio/[0-9]*", "/dev/accel*")  # Device files of chips: of newer generations, and of older ones.
LOCKFILE = "/tmp/libtpu_lockfile"  # A process that is killed leaves libtpu's lock behind.
POLL_S = 0.1

# What libtpu says when it can't start, as quoted in bug reports (vllm-project/tpu-inference 2257, levanter 1127,
# transformers 28204). Opening an older device, /dev/accel*, that another process has open gives EPERM.
_BUSY = re.compile(r"Device or resource busy|already in use|/dev/accel\d+\)?: Operation not permitted|libtpu_lockfile")
# Messages of XLA, gloo and JAX's coordination service on one host when another process of its slice is gone.
_OF_OTHERS = re.compile(
    r"(?i)\bpeer\b|connection (reset|closed|refused)|failed to connect|socket closed|deadline_exceeded|barrier|"
    r"coordinat"
)
_LOG = "see the host's log"
_ADVICE = (
    (
        r"Permission denied",
        "this user may not open the chips' devices; run the container with --privileged, or give the user the devices' "
        "group (ls -l /dev/vfio /dev/accel*)",
    ),
    (
        r"Expected \d+ worker addresses, got \d+",
        "this host is one of several in its TPU slice, and all of them must start together: give its node the labels "
        "of the whole slice, and unset TPU_PROCESS_ADDRESSES",
    ),
    (
        r"(?i)unsupported|unknown tpu|unrecognized|no such device type",
        "this libtpu may be older than the chip: pip install --upgrade '.[tpu]'",
    ),
)


def wait_for_chips(timeout_s: float, devices: Sequence[str] = DEVICES, lockfile: str = LOCKFILE) -> None:
    """Wait until no other process has a chip open, and remove the lock that one may have left behind.

    Call this before JAX is imported: otherwise libtpu would fail, and JAX would continue on the CPU.

    Raises:
        ChipsBusy: A process still has a chip open; the message names the process.
    """
    until = time.monotonic() + timeout_s
    while users := list_holders(map(os.path.realpath, list_device_files(devices))):
        if time.monotonic() > until:
            pid, path = next(iter(users.items()))
            raise ChipsBusy(f"process {pid} ({_read_command(pid)}) still has {path} open after {timeout_s:g} s; end it")
        time.sleep(POLL_S)
    if not list_holders([os.path.realpath(lockfile)]):
        with contextlib.suppress(OSError):  # There may be none, or it may be another user's.
            os.unlink(lockfile)


def list_device_files(patterns: Sequence[str] = DEVICES) -> list[str]:
    """Return the device files of this machine's chips."""
    return sorted(path for pattern in patterns for path in glob.glob(pattern))


def classify_start_failure(place: str, error: Exception) -> SliceError:
    """Return the error to raise when JAX can't start the TPU of a host.

    Args:
        place: The host, for messages.

    Returns:
        `ChipsBusy`, after which another try makes sense, if another process has the chips; `OtherHostGone` if the host
        waited for another one in vain; otherwise `WrongHost`.
    """
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    if _BUSY.search(reason):
        return ChipsBusy(f"another process has the TPU of {place}: {reason}")
    problem = f"JAX can't start the TPU of {place}: {reason}"
    advice = next((advice for pattern, advice in _ADVICE if re.search(pattern, reason)), None)
    if advice is None and _OF_OTHERS.search(reason):
        return OtherHostGone(
            f"{problem}; another host of its slice has failed or is missing; see the logs of all hosts"
        )
    return WrongHost(f"{problem}; {advice or _LOG}")


def speaks_of_others(error: Exception) -> bool:
    """Return whether an error says that another host is gone. Then that host is to blame, not the one that raised."""
    if isinstance(error, OtherHostGone):
        return True
    return isinstance(error, DeviceError) and _OF_OTHERS.search(str(error)) is not None


def list_holders(paths: Iterable[str]) -> dict[int, str]:
    """Return the other processes that have one of some files open, and the file. Other users' processes aren't seen."""
    files, users = set(paths), dict[int, str]()
    for folder in Path("/proc").glob("[0-9]*/fd"):
        pid = int(folder.parent.name)
        if pid != os.getpid():
            with contextlib.suppress(OSError):  # It may have ended, or be another user's.
                open_files = files & {os.readlink(file) for file in folder.iterdir()}
                users |= dict.fromkeys([pid], min(open_files)) if open_files else {}
    return users


def _read_command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return " ".join(word.decode(errors="replace") for word in words if word)[:100]
    return "ended meanwhile"
