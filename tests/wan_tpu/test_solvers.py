"""The coefficient tables against diffusers' schedulers, which step through the same random velocities."""

import diffusers
import numpy as np
import pytest
import torch

from wan_tpu.solvers import solver_table

TOLERANCE = 1e-5  # relative; diffusers computes in float32, which gives 2e-6


def scheduler(solver, shift):
    if solver == "euler":
        return diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 8.0, 12.0])
@pytest.mark.parametrize("solver", ["unipc", "euler"])
def test_every_step_equals_diffusers(solver, shift):
    for steps in range(1, 51):
        reference, table = scheduler(solver, shift), solver_table(solver, steps, shift)
        reference.set_timesteps(steps)
        reference.set_begin_index(0)
        np.testing.assert_allclose(table.timesteps, reference.timesteps.numpy(), rtol=1e-6)
        rng = np.random.default_rng(steps)
        x = rng.standard_normal((1, 4, 1, 2, 2))
        expected = torch.tensor(x, dtype=torch.float32)
        history = [np.zeros_like(x)] * table.history_terms
        for i, timestep in enumerate(reference.timesteps):
            velocity = rng.standard_normal(x.shape)
            expected = reference.step(torch.tensor(velocity, dtype=torch.float32), timestep, expected).prev_sample
            terms = [x, x - table.sigmas[i] * velocity, *history]
            x, *history = (sum(c * term for c, term in zip(row, terms, strict=True)) for row in table.matrices[i])
            assert np.abs(x - expected.numpy()).max() <= TOLERANCE * np.abs(x).max(), (steps, i)


def test_tables_are_float64_and_small():
    table = solver_table("unipc", 40, 5.0)
    assert table.matrices.dtype == np.float64
    assert table.history_terms == 3
    assert solver_table("euler", 40, 5.0).history_terms == 0


def test_boundary_of_the_published_model():
    # shift 5, boundary 0.9, 40 steps: 36 % of the steps are high-noise
    table = solver_table("unipc", 40, 5.0)
    assert table.high_noise_steps(0.9) == int((table.timesteps >= 900).sum()) == 15
    assert table.high_noise_steps(None) == 40
