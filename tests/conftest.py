"""Shared by all tests: CPU only, no network, small checkpoints made once a session."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["IMAGEIO_FFMPEG_NO_PREVENT_SIGINT"] = "1"  # else reading a video back forks in Python, beside JAX's threads

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wan_tpu import Pipeline, load_pipeline
from wan_tpu.tiny import make_checkpoint

# pytest-xdist's workers ignore Ctrl-C, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
PHOTO = ROOT / "examples" / "cat.png"


# What starts clusters, and clocks them: all of it in one of pytest-xdist's processes, one cluster at a time.
CLUSTERS = ("tests/cluster/", "tests/actors/")
NO_CLUSTERS = ("tests/actors/api/", "tests/actors/jobs/")


def group(nodeid: str) -> str:
    """Return what is kept together in one process: the file, or all that starts clusters."""
    clusters = nodeid.startswith(CLUSTERS) and not nodeid.startswith(NO_CLUSTERS)
    return "clusters" if clusters else nodeid.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run clusters first, as they mostly wait.

    What loads libtpu into the process comes last: with it, JAX's profiler crashes on a machine without a TPU.
    """
    items.sort(key=lambda item: (item.get_closest_marker("loads_libtpu") is not None, group(item.nodeid) != "clusters"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out groups. (Its own `--dist loadgroup` doesn't see them: 3.8 with pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return Groups(config, log)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a small checkpoint of a kind; read it, don't change it."""

    @functools.cache
    def made(kind: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / kind, kind)

    return made


@pytest.fixture(scope="session")
def pipeline(checkpoint: Callable[[str], Path]) -> Callable[..., Pipeline]:
    """Returns the pipeline of a kind and dtype; programs and weights are shared by all tests."""

    @functools.cache
    def loaded(kind: str, dtype: str = "float32") -> Pipeline:
        return load_pipeline(checkpoint(kind), dtype=dtype, mesh=(1, 1, 1))

    return loaded
