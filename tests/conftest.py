"""Shared by all tests: CPU only (but for `make test-tpu`), no network, small checkpoints made once a session."""

import os
import sys

os.environ["JAX_PLATFORMS"] = os.environ.get("WAN_TPU_TEST_PLATFORMS", "cpu")
# Tests, and the processes that they start, compile the same small programs again and again.
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.abspath(f"{__file__}/../../build/compiled-for-tests")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Unoptimised code computes the same and is compiled six times as fast; what tests compile runs once or twice.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if sys.version_info < (3, 12):  # JAX 0.10; that of newer Pythons ends the process for a flag that it doesn't know
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # its 15 is below what computes beside
# numpy's and torch's threads spin while they wait for each other: beside other tests that took ten times as long.
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["DIFFUSERS_VERBOSITY"] = os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # as commands set it
os.environ["IMAGEIO_FFMPEG_NO_PREVENT_SIGINT"] = "1"  # else reading a video back forks in Python, beside JAX's threads

import functools
import gc
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xdist.scheduler import LoadFileScheduling

from cluster.emulation import fork_server, ray_nodes
from wan_tpu import GenerationRequest, Pipeline, StepEvent, load_pipeline
from wan_tpu.tiny import make_checkpoint

# pytest-xdist's workers ignore Ctrl-C, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.set_threshold(100_000)  # JAX makes many objects that last: each look at them is for nothing

ROOT = Path(__file__).parent.parent
STAGES = ("encoder", "denoise_high", "denoise_low", "decoder")  # of a model of two experts
PHOTO = ROOT / "examples" / "cat.png"


def with_devices(count: int) -> dict[str, str]:
    """The environment of a child process with that many virtual CPU devices."""
    return os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"}


# They share pipelines, each of which takes seconds to be traced and compiled.
SHARING = (
    "tests/actors/test_bucket.py",
    "tests/actors/test_one_process.py",
    "tests/wan_tpu/test_adapters",
    "tests/wan_tpu/test_cogvideox_parity.py",
    "tests/wan_tpu/test_eight_bits.py",
    "tests/wan_tpu/test_known_mistakes.py",
    "tests/wan_tpu/test_parity.py",
    "tests/wan_tpu/test_request.py",
    "tests/wan_tpu/test_stages.py",
)


def starts_clusters(nodeid: str) -> bool:
    """Whether a test is among those that start Ray clusters and clock them: tests/cluster, and most of tests/actors."""
    computing = ("tests/actors/api/", "tests/actors/jobs/", "tests/actors/slices/test_stage_host.py", *SHARING)
    return nodeid.startswith(("tests/cluster/", "tests/actors/")) and not nodeid.startswith(computing)


HEAVY = ("tests/kernels/test_bundles.py", "tests/test_packaging.py")  # half a minute of one core each
PLAN = "tests/wan_tpu/test_plan_command.py"  # two minutes of one core: beside clusters it would starve if it gave way


class Scheduling(LoadFileScheduling):
    """Runs the tests that start clusters in two of pytest-xdist's processes, and most others file by file."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(SHARING):
            return "pipelines"
        if not starts_clusters(nodeid) and not nodeid.startswith(PLAN):
            return super()._split_scope(nodeid)
        slices = ("slices/", "on_slices/", "test_spot.py", "test_meters.py")
        first = (*(f"tests/actors/{name}" for name in slices), PLAN)
        return "clusters: slices" if nodeid.startswith(first) else "clusters: all others"  # about as long


# Each part of one family, and the rarer kernels. Without them every family's whole videos are compared with diffusers'.
IN_DEPTH = re.compile(
    r"tests/(wan_tpu/test_(cogvideox|helios|hunyuan15|ltx2|minimax_h3)_(?!parity|pipeline)"
    r"|kernels/test_(low_precision|sparse_attention)|cluster/test_slice_faults)"
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """pytest-xdist's own groups are nothing to pytest 9.2."""
    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what isn't asked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave what goes into depth to `make test-long`, and order the rest so that files end together.

    What starts clusters comes first, which takes longest, then what computes most. What loads libtpu into this process
    comes last: with it, JAX's profiler crashes on a machine without a TPU.
    """
    for item in items:
        if IN_DEPTH.match(item.nodeid):
            item.add_marker(pytest.mark.long)
    heavy = ("tests/wan_tpu/", "tests/quality/", "tests/actors/slices/test_stage_host.py", *HEAVY)
    items.sort(
        key=lambda item: (
            not starts_clusters(item.nodeid),
            item.get_closest_marker("loads_libtpu") is not None,
            not item.nodeid.startswith(heavy),
        )
    )


def pytest_collection_finish() -> None:
    """Have no garbage collection look at what was imported."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Nor the last ones, pytest's five and Python's own: they take seconds in each of pytest-xdist's processes."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let what computes give way, in several processes, to what starts clusters: that waits half of its time."""
    computes = not starts_clusters(item.nodeid) and not item.nodeid.startswith(PLAN)
    if "PYTEST_XDIST_WORKER" in os.environ and computes and os.nice(0) == 0:
        os.nice(10)


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
def forks(token: Path) -> Iterator[Path]:
    """Where a server listens whose forks are workers of emulated clusters: what they import was imported once."""
    with tempfile.TemporaryDirectory(prefix="wan-") as folder:
        path = Path(folder) / "forks"
        with ray_nodes.environment():
            server = fork_server.start(path, "actors.imported", ends_with_caller=True)
        yield path
        server.kill()
        server.communicate()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a small checkpoint of a kind; read it, don't change it."""

    @functools.cache
    def build(kind: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / kind, kind)

    return build


@pytest.fixture(scope="session")
def pipeline(checkpoint: Callable[[str], Path]) -> Callable[..., Pipeline]:
    """Returns the pipeline of a kind and dtype; programs and weights are shared by all tests."""

    @functools.cache
    def loaded(kind: str, dtype: str = "float32") -> Pipeline:
        return load_pipeline(checkpoint(kind), dtype=dtype, mesh=(1, 1, 1))

    return loaded


def denoised(pipe: Pipeline, request: GenerationRequest, noise: np.ndarray | None = None) -> list[StepEvent]:
    """Return what is told of a request's steps, their latents among it. Nothing is decoded."""
    plan, events = pipe.plan(request), list[StepEvent]()
    conditioning = pipe.encode(plan)
    state = pipe.initial_state(plan, noise, conditioning)
    pipe.denoise(plan, conditioning, state, on_step=events.append)
    return events
