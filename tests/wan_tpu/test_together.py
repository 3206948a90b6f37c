"""Requests that are stepped together are what they are alone, each at a step of its own."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.wan_tpu.together import check, run_of
from wan_tpu import DenoiseState, InvalidRequest, UnhealthyResult

KIND = "wan2.2-i2v-a14b"


@pytest.mark.parametrize("kind", [KIND, "wan2.2-ti2v-5b"])
@pytest.mark.parametrize("given", [{}, {"guidance_scale": 1.0, "solver": "euler"}], ids=["unipc", "unguided euler"])
def test_two_requests_together_are_each_alone(kind, given, pipeline):
    """Of TI2V 5B the given frame has a timestep of its own: two modulations for each request."""
    size = {} if kind == KIND else {"height": 64, "width": 96}  # its VAE makes 32 pixels of a patch
    check(pipeline(kind), **size, **given)


def test_on_meshes_too(checkpoint):
    done = subprocess.run(
        [sys.executable, "-m", "tests.wan_tpu.together_worker", checkpoint(KIND)],
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "checked\n"


def test_nan_is_one_request_s_own(pipeline):
    pipe = pipeline(KIND)
    runs = [run_of(pipe, number, number) for number in range(3)]
    runs[0].step_with(runs[1], runs[2])
    healthy = [np.asarray(run.state.latents) for run in runs]
    runs = [run_of(pipe, number, number) for number in range(3)]
    state = runs[1].state
    runs[1].state = DenoiseState(state.latents.at[0, 0, 0, 0, 0].set(np.nan), state.history, state.step)
    first, poisoned, last = runs[0].step_with(runs[1], runs[2])
    assert isinstance(poisoned, UnhealthyResult)
    assert "denoise_high, step 2 of 6" in str(poisoned)
    assert runs[1].state.step == 1
    assert (first.step, last.step) == (1, 3)
    for i in (0, 2):
        assert np.array_equal(np.asarray(runs[i].state.latents), healthy[i])


def test_what_is_not_of_equal_shape_is_refused_and_not_touched(pipeline):
    pipe = pipeline(KIND)
    run = run_of(pipe, 0, 0)
    others = [run_of(pipe, 1, 0, height=32), run_of(pipe, 1, 0, solver="euler"), run_of(pipe, 1, 0, guidance_scale=1.0)]
    for other in others:
        with pytest.raises(InvalidRequest, match="can't be stepped together; step each alone"):
            run.step_with(other)
        assert run.state.step == other.state.step == 0


def test_what_recompiles_is_the_number_of_requests(pipeline):
    pipe = pipeline(KIND)
    runs = [run_of(pipe, number, number) for number in range(2)]
    runs[0].step_with(runs[1])
    program = pipe.runtime.programs["denoise step"]
    compiled = len(program._compiled)
    runs[1].step_with(runs[0])
    runs[0].step()
    assert len(program._compiled) == compiled
