"""Run a small model from text to pixels: on one device and on all, compared with a CPU device, and its mp4."""

import time
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from actors.doctor.finding import Finding, Machine
from actors.doctor.prediction import find_model_of_two_experts
from wan_tpu.media.mp4 import Mp4
from wan_tpu.pipeline import load_pipeline
from wan_tpu.request import GenerationRequest
from wan_tpu.runtime.mesh import AXES
from wan_tpu.switches import SYNCHRONOUS, read_switches, set_switches
from wan_tpu.tiny import make_checkpoint

REQUEST = GenerationRequest(prompt="A cat looks.", height=32, width=64, frames=9, steps=3)
# Pixels, of 1. Sums in another order move a small model's by 1e-5; bfloat16 holds 8 bits of each number on the way.
EXACT, ROUNDED = 2e-3, 0.1
_ADVICE = "videos would be wrong: attach this report to an issue"


def check_small_model(machine: Machine) -> Iterator[Finding]:
    """Yield how far its pixels are from those of one CPU device, whose results the tests compare with diffusers'."""
    checkpoint = make_checkpoint(machine.folder / "small", find_model_of_two_experts())
    expected = _compute_pixels(checkpoint, "float32", jax.local_devices(backend="cpu")[:1])
    if not machine.is_rehearsal:
        yield _compare(
            "one device, float32",
            _compute_pixels(checkpoint, "float32", jax.local_devices()[:1]),
            expected,
            EXACT,
        )
    if machine.devices > 1:
        yield _compare("all devices, float32", _compute_pixels(checkpoint, "float32", None), expected, EXACT)
    if machine.devices > 1 and not machine.is_rehearsal:
        before = read_switches()
        set_switches(collectives=SYNCHRONOUS)
        pixels = _compute_pixels(checkpoint, "float32", None)
        set_switches(**before)
        yield _compare("all devices, nothing overlapped", pixels, expected, EXACT)
    yield _compare("all devices, bfloat16", _compute_pixels(checkpoint, "bfloat16", None), expected, ROUNDED)


def check_mp4(machine: Machine) -> Iterator[Finding]:
    """Yield how many frames a second this host's ffmpeg encodes."""
    height, width, count = (192, 320, 17) if machine.is_rehearsal else (720, 1280, 81)
    frames = np.random.default_rng(0).integers(0, 255, (count, 3, height // 8, width // 8), np.uint8)
    frames = frames.repeat(8, axis=2).repeat(8, axis=3)
    start = time.perf_counter()
    with Mp4(16) as video:
        video.add(frames)
        video.finish()
        failure = video.failure
    rate = count / (time.perf_counter() - start)
    if failure is not None:
        yield Finding("mp4", str(failure), "fail", "a file", "install a version of imageio-ffmpeg that includes ffmpeg")
        return
    yield Finding("mp4", f"{rate:.0f} frames a second of {width}x{height}", figures={"frames_per_s": rate})


def _compute_pixels(checkpoint: object, dtype: str, devices: list[jax.Device] | None) -> np.ndarray:
    mesh = None if devices is None else Mesh(np.array(devices).reshape(1, 1, 1), AXES)
    return load_pipeline(str(checkpoint), dtype, mesh, keep_weights=False).generate(REQUEST).pixels


def _compare(name: str, pixels: np.ndarray, expected: np.ndarray, tolerance: float) -> Finding:
    off = float(np.abs(pixels - expected).max())
    fine = off <= tolerance
    return Finding(
        name,
        f"pixels off by {off:.1e}",
        "ok" if fine else "fail",
        f"at most {tolerance:g}",
        "" if fine else _ADVICE,
        {"off": off},
    )
