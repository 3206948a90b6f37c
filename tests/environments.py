"""Virtual environments with only the required distributions, which are linked from this one and not downloaded."""

import importlib.metadata
import os
import subprocess
import sys
import venv
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT


def build_wheel(folder: Path) -> Path:
    """Build this project's wheel outside its source folder; return the wheel's path."""
    source = folder / "source"
    source.mkdir()
    for name in ("actors", "cluster", "kernels", "wan_tpu", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def make_environment(folder: Path, wheel: Path, *extras: str) -> Path:
    """Install a wheel with some extras into a new environment; return the path of the environment's Python."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = ["install", "--no-deps", "--no-compile", "--quiet", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    [project] = importlib.metadata.distributions(path=[str(packages)])
    _link(packages, _required_by(project, extras))
    return python


def _required_by(
    project: importlib.metadata.Distribution, extras: Iterable[str]
) -> list[importlib.metadata.Distribution]:
    """Return the installed distributions that a distribution requires, directly or indirectly."""
    required: dict[str, importlib.metadata.Distribution] = {}
    seen = {(canonicalize_name(project.name), extra) for extra in ("", *extras)}
    open_ends = list(seen)
    while open_ends:
        name, extra = open_ends.pop()
        if name == canonicalize_name(project.name):
            distribution = project
        else:
            distribution = required[name] = importlib.metadata.distribution(name)
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                requirements = {(canonicalize_name(requirement.name), extra) for extra in ("", *requirement.extras)}
                open_ends += requirements - seen
                seen |= requirements
    return list(required.values())


def _link(packages: Path, distributions: list[importlib.metadata.Distribution]) -> None:
    """Link the files of distributions. A folder that several of them share, such as google, is linked file by file."""
    owners = Counter(
        top
        for distribution in importlib.metadata.distributions()
        for top in {file.parts[0] for file in distribution.files or ()}
    )
    for distribution in distributions:
        for file in distribution.files or ():
            top = file.parts[0]
            if top in ("..", "__pycache__"):  # Scripts, which these environments don't need, and caches.
                continue
            path = Path(top) if owners[top] == 1 else Path(*file.parts)
            target = packages / path
            source = distribution.locate_file(path)
            if not target.exists() and os.path.exists(source):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(source)
