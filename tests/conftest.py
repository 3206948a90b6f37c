"""Shared by all tests: CPU only, no network, small checkpoints made once a session."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["IMAGEIO_FFMPEG_NO_PREVENT_SIGINT"] = "1"  # else reading a video back forks in Python, beside JAX's threads

import functools
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from wan_tpu import Pipeline, load_pipeline
from wan_tpu.tiny import make_checkpoint

# pytest-xdist's workers ignore Ctrl-C, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
PHOTO = ROOT / "examples" / "cat.png"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what loads libtpu into this process last: with it, JAX's profiler crashes on a machine without a TPU."""
    items.sort(key=lambda item: item.get_closest_marker("loads_libtpu") is not None)


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
