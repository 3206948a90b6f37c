"""Shared by all tests: CPU only, no network, small checkpoints made once a session."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests, and the processes that they start, compile the same small programs again and again.
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.abspath(f"{__file__}/../../build/compiled-for-tests")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # its 15 is below what computes beside
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["IMAGEIO_FFMPEG_NO_PREVENT_SIGINT"] = "1"  # else reading a video back forks in Python, beside JAX's threads

import functools
import signal
from collections.abc import Callable, Iterator
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


@pytest.fixture(scope="session", autouse=True)
def token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The token of the Ray clusters that tests start: none is written into the home folder."""
    path = tmp_path_factory.mktemp("token") / "auth_token"
    path.write_text("of-the-tests-" * 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
        patch.setenv("RAY_AUTH_MODE", "token")
        yield path


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
