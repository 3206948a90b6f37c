"""The container of a cluster: what a reader of Dockerfiles finds in it, and that what it copies is there."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.conftest import ROOT
from wan_tpu.storage.addresses import SCHEMES

FILE = ROOT / "cluster" / "Dockerfile"


def test_dockerfile_passes_hadolint():
    subprocess.run([Path(sys.executable).with_name("hadolint"), FILE], check=True)


def test_image_has_what_every_command_and_address_on_a_cluster_needs():
    """Of the extras in pyproject.toml; a command names the one that it lacks, but an image can't be added to."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [default] = re.findall(r"^ARG EXTRAS=(\S+)$", FILE.read_text(), re.M)
    assert set(default.split(",")) <= set(extras)
    services = {scheme.removesuffix("://") for scheme in SCHEMES} & set(extras)  # gs:// needs no extra.
    assert {"serve", "tpu", "postgresql", *services} <= set(default.split(","))


def test_copied_files_are_sent_to_the_builder():
    copied = [
        name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", FILE.read_text(), re.M) for name in line.split()
    ]
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    assert {"actors", "pyproject.toml"} <= set(copied) <= sent
    assert all((ROOT / name).exists() for name in copied)
