"""The container of a cluster: what a reader of Dockerfiles finds in it, and that what it copies is there."""

import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

FILE = ROOT / "cluster" / "Dockerfile"


def test_nothing_is_found_wrong():
    subprocess.run([Path(sys.executable).with_name("hadolint"), FILE], check=True)


def test_what_is_copied_is_sent_to_the_builder():
    copied = [
        name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", FILE.read_text(), re.M) for name in line.split()
    ]
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    assert {"actors", "pyproject.toml"} <= set(copied) <= sent
    assert all((ROOT / name).exists() for name in copied)
