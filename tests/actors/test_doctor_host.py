"""`wan-tpu doctor` on the machine itself, in real processes under real limits."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import ROOT

# Sets a limit, gives up root's capabilities where it has them, and tries to lock more memory than the limit.
_CHILD = """
import ctypes, dataclasses, json, mmap, os, resource, sys
from pathlib import Path
from actors.doctor.host import check_lock_file, check_locked_memory

soft, has_chips, lock = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))
findings = [check_locked_memory(has_chips)] if os.geteuid() == 0 else []
if os.geteuid() == 0:
    os.setuid(65534)
findings.append(check_locked_memory(has_chips))
findings += check_lock_file(Path(lock))
pages = mmap.mmap(-1, 2**20)
address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
is_locked = ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(2**20)) == 0
print(json.dumps([[dataclasses.asdict(finding) for finding in findings], is_locked]))
"""


def check_in_child(soft, has_chips=True, lock="/tmp/nothing here"):
    command = [sys.executable, "-c", _CHILD, json.dumps([soft, has_chips, lock])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_small_limit_of_locked_memory_is_a_warning_that_says_how_to_raise_it():
    findings, is_locked = check_in_child(2**16)
    assert not is_locked
    assert (findings[-1]["measured"], findings[-1]["verdict"]) == ("0.0625 MiB", "warn")
    for remedy in ("ulimit -l unlimited", "LimitMEMLOCK=infinity", "--ulimit memlock=-1", "docs/gke.md"):
        assert remedy in findings[-1]["advice"]
    if len(findings) == 2:
        assert (findings[0]["verdict"], findings[0]["advice"]) == ("ok", "")


def test_limit_of_locked_memory_is_no_concern_without_chips():
    findings, _ = check_in_child(2**16, has_chips=False)
    assert {finding["verdict"] for finding in findings} == {"info"}


def test_lock_of_another_user_is_named():
    with tempfile.NamedTemporaryFile(dir="/tmp") as lock:
        Path(lock.name).chmod(0)
        findings, _ = check_in_child(2**16, has_chips=False, lock=lock.name)
    assert findings[-1]["verdict"] == "fail"
    assert f"{lock.name} belongs to user {os.getuid()}; user" in findings[-1]["measured"]
    assert findings[-1]["advice"].endswith(f"rm {lock.name}")
