"""What can go wrong with a folder of this machine: full and read-only disks, other users, killed writers."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from wan_tpu.storage.base import StorageError
from wan_tpu.storage.local import LocalStorage
from wan_tpu.storage.opening import open_storage


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The outcome of each case of storage_worker.py, and its folder."""
    folder = tmp_path_factory.mktemp("limits")
    for path in (folder, *folder.parents):
        if not path.stat().st_mode & 0o001:
            path.chmod(0o755)  # so that another user gets as far as the folder that is closed to it
    command = [sys.executable, "-m", "tests.actors.storage_worker", str(folder)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return {case: lines for case, *lines in json.loads(done.stdout)}, folder


def lines_of(outcomes, case):
    lines = outcomes[0][case]
    if lines[0].startswith("refused: "):
        pytest.skip(f"this machine lets nobody mount in a namespace of their own: {lines[0]}")
    return lines


def test_write_to_a_full_disk_leaves_no_half_file(outcomes):
    probe, error, left = lines_of(outcomes, "full")
    assert probe == "probe: well"
    where = outcomes[1] / "full" / "large.mp4"
    assert (
        error == f"can't write {where} (No space left on device); free some space, or choose a folder on another disk"
    )
    assert left == "['small.txt']"  # no half file


def test_probe_finds_a_disk_that_is_full_from_the_start(outcomes):
    error, left = lines_of(outcomes, "full from the start")
    assert error.startswith(f"can't write {outcomes[1]}/full from the start (No space left on device); free some space")
    assert left == "['zeros']"


def test_probe_finds_a_read_only_disk(outcomes):
    error, _ = lines_of(outcomes, "read-only")
    assert (
        error == f"can't write {outcomes[1]}/read-only (Read-only file system); choose a folder that can be written to"
    )


def test_write_beyond_the_limit_on_file_sizes_leaves_no_half_file(outcomes):
    _, error, left = lines_of(outcomes, "limit")
    assert error.startswith(f"can't write {outcomes[1]}/limit/large.mp4 (File too large); raise the limit")
    assert left == "['small.txt']"


def test_probe_finds_a_folder_of_another_user(outcomes):
    error, _ = lines_of(outcomes, "nobody")
    assert error == f"can't write {outcomes[1]}/nobody (Permission denied); choose a folder that can be written to"


def test_files_are_their_user_s_own_whatever_the_folder_and_the_umask_are(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    before = os.umask(0o022)
    try:
        LocalStorage(shared).write("a/snapshot.safetensors", b"latents")
        with LocalStorage(shared).claim([]):
            files = [path for path in shared.rglob("*") if path.is_file()]
    finally:
        os.umask(before)
    assert len(files) == 2 and all(path.stat().st_mode & 0o777 == 0o600 for path in files)


def test_folder_that_can_t_be_listed_isn_t_empty(tmp_path):
    """As a file system that is away for a while: for a request it would say that it has no snapshot."""
    assert LocalStorage(tmp_path / "not yet").list() == {}
    (tmp_path / "away").write_text("no folder")
    with pytest.raises(StorageError, match="away"):
        LocalStorage(tmp_path / "away").list()


def test_file_in_the_way_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "out" / "cat.mp4").mkdir(parents=True)
    with pytest.raises(StorageError, match="file/out"):
        LocalStorage(tmp_path / "file" / "out").probe()
    with pytest.raises(StorageError, match=r"cat\.mp4"):
        LocalStorage(tmp_path / "out").write("cat.mp4", b"")
    with pytest.raises(StorageError, match=r"cat\.mp4"):
        LocalStorage(tmp_path / "out").read("cat.mp4")


_HOLD = """
import sys, time
from wan_tpu.storage.local import LocalStorage
with LocalStorage(sys.argv[1]).claim(["cat.mp4"]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_folder_has_one_writer_at_a_time_and_none_after_its_death(tmp_path):
    storage = LocalStorage(tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match=f"process {holder.pid} "):
            with storage.claim([]):
                pass
        # What a killed writer leaves: ours is removed, what somebody else is writing there isn't.
        (tmp_path / ".cat.mp4.0123456789ab.partial").write_bytes(b"half")
        (tmp_path / ".dog.mp4.0123456789ab.partial").write_bytes(b"half")
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        with storage.claim(["cat.mp4"]):
            assert [path.name for path in tmp_path.glob("*.partial")] == [".dog.mp4.0123456789ab.partial"]
    finally:
        holder.kill()
        holder.wait(10)


def test_half_file_of_a_killed_writer_is_removed_in_time(tmp_path):
    """A write is killed in its middle: what it leaves is hidden, and is nobody's."""
    code = "import sys, pathlib; from wan_tpu.storage.local import LocalStorage; storage = LocalStorage(sys.argv[1])\n"
    code += "with storage._partial(pathlib.Path(sys.argv[1], 'below/video.mp4')):\n"
    code += "    print('here', flush=True); sys.stdin.read()"
    (tmp_path / "below").mkdir()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT, **pipes) as writer:
        writer.stdout.readline()
        writer.kill()
    storage = open_storage(tmp_path)
    storage.write("below/whole.mp4", b"whole")
    [left] = (tmp_path / "below").glob(".*")
    storage.clean(3600)
    assert left.exists()  # perhaps it is being written
    os.utime(left, (0, 0))
    storage.clean(3600)
    assert not left.exists()
    assert storage.list() == {"below/whole.mp4": 5}
