"""The schedules of Helios' stages and the noise between them, against diffusers' schedulers and pipeline."""

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.helios.pipeline_helios import calculate_shift

from wan_tpu.families.helios.noise import draw_between, square_factor
from wan_tpu.families.helios.published import PyramidConfig
from wan_tpu.families.helios.schedule import stage_schedule

TOKENS = (540, 2160, 8640)
PATCH = (1, 2, 2)


def scheduler_of(pyramid):
    settings = {
        "stages": pyramid.stages,
        "stage_range": list(pyramid.stage_range),
        "gamma": pyramid.gamma,
        "shift": pyramid.shift,
        "use_dynamic_shifting": pyramid.dynamic,
        "time_shift_type": pyramid.shift_type,
    }
    if pyramid.solver == "dmd":
        return diffusers.HeliosDMDScheduler(**settings)
    return diffusers.HeliosScheduler(**settings, scheduler_type=pyramid.solver)


def run_theirs(pyramid, stage, steps, tokens, velocities, start, amplified=False):
    """Return what diffusers' scheduler makes of the velocities of one stage after each step, and its timesteps."""
    scheduler, mu = scheduler_of(pyramid), calculate_shift(tokens, *pyramid.shift_tokens, *pyramid.shifts)
    if pyramid.stages == 1:
        scheduler.set_timesteps(steps, sigmas=np.linspace(0.999, 0.0, steps + 1)[:-1], mu=mu)
    else:
        scheduler.set_timesteps(steps, stage, mu=mu, is_amplify_first_chunk=amplified)
    latents, results, times = start, [], scheduler.timesteps
    for i, time in enumerate(times):
        more = {}
        if pyramid.solver == "dmd":
            more = {"dmd_sigmas": scheduler.sigmas, "dmd_timesteps": times, "all_timesteps": times}
            more |= {"cur_sampling_step": i, "dmd_noisy_tensor": start}
        latents = scheduler.step(velocities[i], time, latents, return_dict=False, **more)[0]
        results.append(latents.numpy())
    return results, (times.to(torch.int64) if pyramid.stages > 1 else times).numpy()


def run_ours(schedule, velocities, start):
    latents = start.numpy().astype(np.float64)
    history, results = [np.zeros_like(latents)] * schedule.history_terms, []
    for i in range(schedule.steps):
        clean = latents - schedule.sigmas[i] * velocities[i].numpy()
        latents, *history = np.tensordot(schedule.matrices[i], np.stack([latents, clean, *history]), 1)
        results.append(latents)
    return results


PYRAMIDS = [
    PyramidConfig(stages=1, dynamic=True),
    PyramidConfig(stages=1, solver="euler"),
    PyramidConfig(dynamic=True),
    PyramidConfig(shift=3.0),
    PyramidConfig(gamma=0.2, solver="euler", dynamic=True, shift_type="linear"),
    PyramidConfig(stages=2, stage_range=(0, 0.5, 1), dynamic=True, shift_tokens=(100, 2000), shifts=(0.3, 2.0)),
    PyramidConfig(dynamic=True, shift_type="linear", solver="dmd"),
    PyramidConfig(solver="dmd"),
]


@pytest.mark.parametrize("pyramid", PYRAMIDS, ids=str)
def test_each_step_is_that_of_diffusers(pyramid):
    generator = torch.Generator().manual_seed(0)
    start, *velocities = torch.randn((21, 1, 2, 1, 2, 2), generator=generator).unbind()
    for stage in range(pyramid.stages):
        for steps, amplified in ((1, False), (2, False), (10, False), (2, True)):
            if amplified and pyramid.solver != "dmd":
                continue
            tokens = TOKENS[stage]
            expected, times = run_theirs(pyramid, stage, steps, tokens, velocities, start, amplified)
            schedule = stage_schedule(pyramid, stage, steps, tokens, amplified=amplified)
            assert np.abs(schedule.timesteps - times).max() <= 1e-4
            for got, reference in zip(run_ours(schedule, velocities, start), expected, strict=True):
                assert np.abs(got - reference).max() <= 2e-6 * np.abs(reference).max()


def test_noise_between_stages_is_that_of_diffusers():
    """With a gamma at which float32 suffices, from the pipeline's own function; at the published one, by covariance."""
    pipeline = diffusers.HeliosPyramidPipeline.__new__(diffusers.HeliosPyramidPipeline)
    pipeline.scheduler = diffusers.HeliosScheduler(gamma=0.3)
    expected = pipeline.sample_block_noise(1, 2, 9, 4, 6, PATCH, generator=torch.Generator().manual_seed(5)).numpy()
    noise = draw_between((1, 2, 9, 4, 6), PATCH, 0.3, torch.Generator().manual_seed(5))
    assert np.abs(noise - expected).max() <= 1e-6
    factor = square_factor(4, 1 / 3)
    assert np.abs(factor @ factor.T - (np.eye(4) * 4 / 3 - 1 / 3)).max() <= 2e-8
