"""Shared by all tests: CPU only (except for `make test-tpu`), no network, small checkpoints built once per session."""

import os
import sys

os.environ["JAX_PLATFORMS"] = os.environ.get("WAN_TPU_TEST_PLATFORMS", "cpu")
# Tests, and the processes that they start, compile the same small programs again and again.
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.abspath(f"{__file__}/../../build/compiled-for-tests")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Unoptimised code computes the same and compiles six times as fast. Most programs in tests run only once or twice.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# This Python has JAX 0.10, which knows the flag. Newer versions of JAX end the process for a flag that they don't know.
if sys.version_info < (3, 12):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# Ray's default of 15 would give its workers less time than the tests that compute in parallel get.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
# The threads of numpy and torch spin while they wait for each other. With other tests in parallel, this took ten times
# as long.
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["DIFFUSERS_VERBOSITY"] = os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # Commands set these as well.
# Otherwise imageio would fork in Python to read a video, which is unsafe with JAX's threads.
os.environ["IMAGEIO_FFMPEG_NO_PREVENT_SIGINT"] = "1"

import ctypes
import functools
import gc
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from xdist.scheduler import LoadFileScheduling

from cluster.emulation import fork_server, ray_nodes
from wan_tpu import GenerationRequest, Pipeline, StepEvent, load_pipeline
from wan_tpu.tiny import make_checkpoint

# pytest-xdist's workers ignore Ctrl-C, and the processes that they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.set_threshold(100_000)  # JAX makes many long-lived objects, so most garbage collections find nothing.

ROOT = Path(__file__).parent.parent
STAGES = ("encoder", "denoise_high", "denoise_low", "decoder")  # The stages of a model with two experts.
PHOTO = ROOT / "examples" / "cat.png"
MOST_MAPPINGS = 5000  # That a process keeps from one module of tests to the next.


def with_devices(count: int) -> dict[str, str]:
    """Return the environment of a child process with that many virtual CPU devices."""
    return os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"}


# These tests run in one process, because they share pipelines, each of which takes seconds to trace and compile.
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
    """Return whether a test starts Ray clusters, or processes that wait for each other, and measures times."""
    folders = (f"tests/actors/{name}/" for name in ("api", "jobs", "simulation"))
    computing = (*folders, "tests/actors/slices/test_stage_host.py", *SHARING)
    return nodeid.startswith(("tests/cluster/", "tests/actors/")) and not nodeid.startswith(computing)


HEAVY = ("tests/kernels/test_bundles.py", "tests/test_packaging.py")  # Each takes half a minute on one core.
PLAN = "tests/wan_tpu/test_plan_command.py"  # Takes two minutes on one core, so it would starve at low priority.


class Scheduling(LoadFileScheduling):
    """Runs the tests that start clusters in two of pytest-xdist's processes, and most others file by file."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(SHARING):
            return "pipelines"
        if not starts_clusters(nodeid) and not nodeid.startswith(PLAN):
            return super()._split_scope(nodeid)
        slices = ("slices/", "on_slices/", "on_service/", "test_spot.py", "test_meters.py")
        first = (*(f"tests/actors/{name}" for name in slices), PLAN)
        # Both groups take about equally long.
        return "clusters: slices" if nodeid.startswith(first) else "clusters: all others"


# Tests of a family besides Wan, of rarely used kernels, of options of a few models, and of what holds for each
# operation or tensor of all families.
IN_DEPTH = re.compile(
    r"tests/(wan_tpu/test_(cogvideox|helios|hunyuan15|ltx2|minimax_h3)_"
    r"|wan_tpu/test_(every_tensor|float32_weights|flops|sparse_linear|video_sparse|turbo|magcache|eight_bits)"
    r"|wan_tpu/test_adapters_(of_other_models|unmet)"
    r"|kernels/test_(low_precision|sparse_attention|tile_attention|windows|folded_conv|group_norm)"
    r"|cluster/test_slice_faults)"
)
# Of these, `make thorough` alone runs the tests of parts of a model, since others compare its whole video, and those of
# what another family's tests show, too.
PARTS = re.compile(
    r"tests/wan_tpu/test_(cogvideox|helios|hunyuan15|ltx2|minimax_h3)_"
    r"(transformer|vae|text|audio)\.py::"
    r"|tests/wan_tpu/test_minimax_h3_continuation"
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """Return the scheduler, because pytest-xdist's own groups have no effect with pytest 9.2."""
    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # The marks must be set before pytest deselects tests by mark.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark in-depth tests for `make test-long`, and order the others so that all processes end at about the same time.

    Tests that start clusters come first, because they take longest, then those that compute most. Tests that load
    libtpu into this process come last, because JAX's profiler then crashes on a machine without a TPU.
    """
    for item in items:
        if IN_DEPTH.match(item.nodeid):
            item.add_marker(pytest.mark.long)
        if PARTS.match(item.nodeid) and item.get_closest_marker("meshes") is None:
            item.add_marker(pytest.mark.thorough)
    heavy = ("tests/wan_tpu/", "tests/quality/", "tests/actors/slices/test_stage_host.py", *HEAVY)
    items.sort(
        key=lambda item: (
            not starts_clusters(item.nodeid),
            item.get_closest_marker("loads_libtpu") is not None,
            not item.nodeid.startswith(heavy),
        )
    )


def pytest_collection_finish() -> None:
    """Exclude everything that was imported from garbage collections."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Make the final garbage collections of pytest and Python cheap: they took seconds in each of xdist's processes."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lower the priority of tests that compute, if several processes run, in favour of those that start clusters.

    The latter spend half of their time waiting, and measure times.
    """
    computes = not starts_clusters(item.nodeid) and not item.nodeid.startswith(PLAN)
    if "PYTEST_XDIST_WORKER" in os.environ and computes and os.nice(0) == 0:
        os.nice(10)


@pytest.fixture(scope="module", autouse=True)
def programs_end() -> Iterator[None]:
    """Let go of a module's compiled programs.

    Each takes several mappings of memory, of which a process may have 65,530. Together, those of four processes filled
    a machine of 24 GiB.
    """
    yield
    if len(Path("/proc/self/maps").read_bytes().splitlines()) > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session", autouse=True)
def token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The token of the Ray clusters that tests start, so that none is written into the home folder."""
    path = tmp_path_factory.mktemp("token") / "auth_token"
    path.write_text("of-the-tests-" * 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
        patch.setenv("RAY_AUTH_MODE", "token")
        yield path


@pytest.fixture(scope="session")
def forks(token: Path) -> Iterator[Path]:
    """The socket of a server that forks the workers of emulated clusters, after it has imported their modules once."""
    with tempfile.TemporaryDirectory(prefix="wan-") as folder:
        path = Path(folder) / "forks"
        with ray_nodes.environment():
            server = fork_server.start(path, "actors.imported", ends_with_caller=True)
        yield path
        server.kill()
        server.communicate()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the folder of a small checkpoint of a kind. Tests must not change it."""

    @functools.cache
    def build(kind: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / kind, kind)

    return build


@pytest.fixture(scope="session")
def pipeline(checkpoint: Callable[[str], Path]) -> Callable[..., Pipeline]:
    """A function that returns the pipeline of a kind and dtype. All tests share its programs and weights."""

    @functools.cache
    def load(kind: str, dtype: str = "float32") -> Pipeline:
        return load_pipeline(checkpoint(kind), dtype=dtype, mesh=(1, 1, 1))

    return load


def record_steps(pipe: Pipeline, request: GenerationRequest, noise: np.ndarray | None = None) -> list[StepEvent]:
    """Denoise a request's video without decoding it, and return the events of its steps, which have the latents."""
    plan, events = pipe.plan(request), list[StepEvent]()
    conditioning = pipe.encode(plan)
    state = pipe.initial_state(plan, noise, conditioning)
    pipe.denoise(plan, conditioning, state, on_step=events.append)
    return events
