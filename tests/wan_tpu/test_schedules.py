"""Schedules against diffusers' schedulers, which step through the same random predictions."""

import diffusers
import numpy as np
import pytest
import torch

from wan_tpu.errors import InvalidRequest
from wan_tpu.families import published_spec
from wan_tpu.families.ltx2.published import DISTILLED_SIGMAS
from wan_tpu.schedules import flow
from wan_tpu.schedules.diffusion import NoiseSchedule, ddim, dpm

TOLERANCE = 1e-5  # relative; diffusers computes in float32, which gives 2e-6
SHAPE = (1, 4, 1, 2, 2)
NOISE = {  # of the published CogVideoX 2B, 5B and 1.5, and what else diffusers' schedulers take
    "2b": {"snr_shift": 3.0, "zero_snr": True, "spacing": "trailing"},
    "5b": {"snr_shift": 1.0, "zero_snr": True, "spacing": "trailing"},
    "noise at the end": {"snr_shift": 3.0, "spacing": "linspace", "final_one": False},
    "leading": {"snr_shift": 1.0},
}
# With fewer than 15 steps, UniPC's last one is of a lower order. With 61 trailing ones, diffusers' rounding makes one
# more, at timestep -1.
STEPS = (1, 2, 3, 4, 7, 14, 15, 16, 40, 50, 61)


def follow(schedule, predictions, rng, noises=None):
    """Yield the states after each step of a schedule, computed from its numbers only."""
    x = rng.standard_normal(SHAPE)
    yield x
    history = [np.zeros(SHAPE)] * schedule.history_terms
    for i, prediction in enumerate(predictions):
        fresh = [] if noises is None else noises[i][-schedule.noise_terms :]
        alpha = 1 if schedule.alphas is None else schedule.alphas[i]
        terms = [x, alpha * x - schedule.sigmas[i] * prediction, *history, *fresh]
        x, *history = (sum(c * term for c, term in zip(row, terms, strict=True)) for row in schedule.matrices[i])
        yield x


def assert_same(state, expected, where):
    assert np.abs(state - expected.numpy()).max() <= TOLERANCE * max(1.0, np.abs(state).max()), where


def flow_scheduler(name, shift):
    if name.startswith("euler"):
        return diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 8.0, 12.0])
@pytest.mark.parametrize("name", ["unipc", "euler", "euler_even"])
def test_every_step_of_a_flow_equals_diffusers(name, shift):
    for steps in STEPS:
        reference, schedule = flow_scheduler(name, shift), getattr(flow, name)(steps, shift)
        if name == "euler_even":
            reference.set_timesteps(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1])
        else:
            reference.set_timesteps(steps)
        reference.set_begin_index(0)
        np.testing.assert_allclose(schedule.timesteps, reference.timesteps.numpy(), rtol=1e-6)
        rng = np.random.default_rng(steps)
        velocities = rng.standard_normal((steps, *SHAPE))
        first, *states = follow(schedule, velocities, rng)
        expected = torch.tensor(first, dtype=torch.float32)
        for i, timestep in enumerate(reference.timesteps):
            velocity = torch.tensor(velocities[i], dtype=torch.float32)
            expected = reference.step(velocity, timestep, expected).prev_sample
            assert_same(states[i], expected, (steps, i))


def test_every_step_of_the_ancestral_method_equals_diffusers():
    for sigmas in (DISTILLED_SIGMAS, (0.9, 0.5), (1.0,)):
        reference, schedule = diffusers.LTXEulerAncestralRFScheduler(eta=1.0), flow.euler_ancestral_at(sigmas)
        reference.set_timesteps(sigmas=[*sigmas, 0.0])
        rng = np.random.default_rng(0)
        velocities = rng.standard_normal((len(sigmas), *SHAPE))
        generator = torch.Generator().manual_seed(1)
        noises = [[torch.randn(SHAPE, generator=generator).numpy()] for _ in schedule.draws]
        first, *states = follow(schedule, velocities, rng, noises)
        expected = torch.tensor(first, dtype=torch.float32)
        generator.manual_seed(1)
        for i, timestep in enumerate(reference.timesteps[:-1]):
            velocity = torch.tensor(velocities[i], dtype=torch.float32)
            expected = reference.step(velocity, timestep, expected, generator=generator).prev_sample
            assert_same(states[i], expected, (sigmas, i))
        assert sum(schedule.draws) == len(sigmas) - 1


def diffusion_scheduler(kind, settings):
    return kind(
        prediction_type="v_prediction",
        snr_shift_scale=settings.get("snr_shift", 3.0),
        rescale_betas_zero_snr=settings.get("zero_snr", False),
        timestep_spacing=settings.get("spacing", "leading"),
        set_alpha_to_one=settings.get("final_one", True),
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
    )


@pytest.mark.parametrize("settings", NOISE.values(), ids=NOISE)
def test_every_step_of_ddim_equals_diffusers(settings):
    for steps in STEPS:
        reference = diffusion_scheduler(diffusers.CogVideoXDDIMScheduler, settings)
        schedule = ddim(NoiseSchedule(**settings), steps)
        reference.set_timesteps(steps)
        rng = np.random.default_rng(steps)
        predictions = rng.standard_normal((steps, *SHAPE))
        first, *states = follow(schedule, predictions, rng)
        expected = torch.tensor(first)
        for i, timestep in enumerate(reference.timesteps[:steps]):
            expected = reference.step(torch.tensor(predictions[i]), timestep, expected).prev_sample
            assert_same(states[i], expected, (steps, i))


@pytest.mark.parametrize("settings", NOISE.values(), ids=NOISE)
def test_every_step_of_dpm_equals_diffusers_with_the_noise_that_it_draws(settings):
    for steps in STEPS:
        reference = diffusion_scheduler(diffusers.CogVideoXDPMScheduler, settings)
        schedule = dpm(NoiseSchedule(**settings), steps)
        reference.set_timesteps(steps)
        generator = torch.Generator("cpu").manual_seed(steps)
        noises = [[torch.randn(SHAPE, generator=generator).numpy() for _ in range(n)] for n in schedule.draws]
        rng = np.random.default_rng(steps)
        predictions = rng.standard_normal((steps, *SHAPE)).astype(np.float32)
        first, *states = follow(schedule, predictions, rng, noises)
        expected, clean = torch.tensor(first, dtype=torch.float32), None
        generator.manual_seed(steps)
        for i, timestep in enumerate(reference.timesteps[:steps]):
            back = reference.timesteps[i - 1] if i else None
            expected, clean = reference.step(
                torch.tensor(predictions[i]), clean, timestep, back, expected, generator=generator
            )
            assert_same(states[i], expected, (steps, i))


@pytest.mark.parametrize("spacing", ["trailing", "leading", "linspace"])
def test_all_numbers_of_steps_have_the_timesteps_of_diffusers(spacing):
    reference = diffusion_scheduler(diffusers.CogVideoXDPMScheduler, {"spacing": spacing})
    for steps in range(1, 1001):
        reference.set_timesteps(steps)
        expected = reference.timesteps.tolist()
        assert NoiseSchedule(spacing=spacing).timesteps(steps).tolist() == expected[:steps]
        assert expected[steps:] in ([], [-1])


def test_more_steps_than_there_are_timesteps_are_refused():
    with pytest.raises(InvalidRequest, match=r"steps is 1001.* 1000"):
        ddim(NoiseSchedule(), 1001)


def test_schedules_are_float64_small_and_shared():
    schedule = flow.unipc(40, 5.0)
    assert schedule.matrices.dtype == schedule.sigmas.dtype == np.float64
    assert (schedule.history_terms, schedule.noise_terms) == (3, 0)
    assert flow.euler(40, 5.0).history_terms == 0
    assert (dpm(NoiseSchedule(), 50).history_terms, dpm(NoiseSchedule(), 50).noise_terms) == (1, 1)
    assert flow.unipc(40, 5.0) is schedule
    with pytest.raises(ValueError, match="read-only"):
        schedule.sigmas[0] = 0


@pytest.mark.parametrize("sigmas", [(1.0, 0.9375, 0.8333, 0.625), (0.9,), tuple(np.linspace(0.98, 0.02, 13))])
@pytest.mark.parametrize("name", ["unipc", "euler"])
def test_explicit_sigmas_equal_diffusers(name, sigmas):
    reference, schedule = flow_scheduler(name, 1.0), getattr(flow, f"{name}_at")(sigmas)
    reference.set_timesteps(sigmas=np.array(sigmas))
    reference.set_begin_index(0)
    np.testing.assert_allclose(schedule.timesteps, reference.timesteps.numpy(), rtol=1e-6)
    rng = np.random.default_rng(0)
    velocities = rng.standard_normal((len(sigmas), *SHAPE))
    first, *states = follow(schedule, velocities, rng)
    expected = torch.tensor(first, dtype=torch.float32)
    for i, timestep in enumerate(reference.timesteps):
        velocity = torch.tensor(velocities[i], dtype=torch.float32)
        expected = reference.step(velocity, timestep, expected).prev_sample
        assert_same(states[i], expected, i)


def test_lightnings_sigmas_are_the_shifted_even_ones():
    sigmas = dict(published_spec("wan2.2-i2v-a14b").presets["lightning"].settings)["sigmas"]
    np.testing.assert_allclose(sigmas, [1, 0.9375, 0.8333, 0.625], atol=1e-4)
    np.testing.assert_allclose(flow.euler_at(sigmas).matrices, flow.euler_even(4, 5.0).matrices, rtol=1e-6)
