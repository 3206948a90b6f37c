"""Writes to folders under limits that only a process of its own can be given; prints what it was told, as JSON.

usage: storage_worker.py FOLDER
"""

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from wan_tpu.storage.base import StorageError
from wan_tpu.storage.opening import open_storage


def main() -> None:
    base = sys.argv[1]
    cases: dict[str, Callable[[Path], None]] = {
        "limit": limit,
        "nobody": nobody,
        "full": full,
        "full from the start": full_from_the_start,
        "read-only": read_only,
    }
    outcomes = []
    for case, prepare in cases.items():
        folder = Path(base, case)
        folder.mkdir()
        reader, writer = os.pipe()
        if not os.fork():  # what is prepared holds for this case only
            os.close(reader)
            try:
                prepare(folder)
                answers = write(folder)
            except MountsRefused as error:
                answers = [f"refused: {error}"]
            os.write(writer, json.dumps([case, *answers]).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            outcomes.append(json.load(pipe))
        os.wait()
    print(json.dumps(outcomes))


def write(folder: Path) -> list[str]:
    """Returns what the storage said, and what it left."""
    storage = open_storage(folder)
    answers = []
    try:
        storage.probe()
        answers.append("probe: well")
        storage.write("small.txt", b"small")
        storage.write("large.mp4", bytes(3_000_000))
    except StorageError as error:
        answers.append(str(error))
    return [*answers, str(sorted(os.listdir(folder)))]


def limit(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def nobody(folder: Path) -> None:
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.setuid(65534)


def full(folder: Path) -> None:
    mount(folder, "size=1m")


def full_from_the_start(folder: Path) -> None:
    mount(folder, "size=64k")
    with contextlib.suppress(OSError):
        (folder / "zeros").write_bytes(bytes(1_000_000))


def read_only(folder: Path) -> None:
    mount(folder, "ro")


class MountsRefused(Exception):
    """This machine lets nobody mount in a namespace of their own."""


def mount(folder: Path, options: str) -> None:
    """Mounts a tmpfs that only this process sees: a user and a mount namespace of its own need no root."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000 | 0x00020000):  # CLONE_NEWUSER | CLONE_NEWNS
        raise MountsRefused(os.strerror(ctypes.get_errno()))
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError as error:
        raise MountsRefused(error) from None
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MountsRefused(done.stderr)


if __name__ == "__main__":
    main()
