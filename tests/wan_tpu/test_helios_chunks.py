"""Chunks of guided models, one after the other, against diffusers; test_helios_pipeline.py has the distilled one."""

import numpy as np
import pytest
import torch

from tests.wan_tpu import helios_reference, helios_worker
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.helios.chunks import enlarge, make_history
from wan_tpu.families.helios.model import guide_scaled
from wan_tpu.families.helios.noise import draw_between, draw_first
from wan_tpu.families.helios.small import make_checkpoint
from wan_tpu.families.helios.spec import HeliosSpec
from wan_tpu.families.model import apply_guidance
from wan_tpu.request import GenerationRequest
from wan_tpu.runtime.mesh import make_mesh

HEIGHT, WIDTH, CHUNKS, SEED = 64, 128, 3, 7
TEXT = np.random.default_rng(0).standard_normal((2, 20, 32)).astype(np.float32)


def denoise_chunk(predict, spec, request, chunk, generator, before):
    """Return the latents after each step of one chunk.

    Args:
        predict: Returns the guided velocity from latents, timestep, history and guidance.
        spec: The model's.
        request: The request.
        chunk: The chunk's number.
        generator: The request's.
        before: The latents of the chunks before.
    """
    history, schedule, results = make_history(spec.latent_shape(request), before), spec.schedule(request), []
    experts = [expert for expert in spec.experts(request) if expert.chunk == chunk]
    latents = draw_first(spec.latent_shape(request), len(experts), generator)
    for expert, stage in zip(experts, spec.pyramid_stages(request, chunk), strict=True):
        if stage.mixing is not None:
            noise = draw_between(stage.shape, spec.patch, spec.config.pyramid.gamma, generator)
            latents = np.float32(stage.mixing[0]) * enlarge(latents) + np.float32(stage.mixing[1]) * noise
        terms = [np.zeros_like(latents)] * schedule.history_terms
        for i in range(expert.start, expert.stop):
            velocity = predict(latents, schedule.timesteps[i], history, schedule.guidance[i])
            clean = latents - np.float32(schedule.sigmas[i]) * velocity
            latents, *terms = np.tensordot(
                schedule.matrices[i].astype(np.float32), np.stack([latents, clean, *terms]), 1
            )
            results.append(latents)
    return results


# What a request says, and how diffusers' pipeline is told the same.
KINDS = {
    "helios-base": ({"steps": 3}, {"num_inference_steps": 3, "guidance_scale": 5.0}),
    "helios-mid": ({"steps": 9}, {"pyramid_num_inference_steps_list": [3, 3, 3], "guidance_scale": 5.0}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_latents_after_each_step_of_three_chunks_are_those_of_diffusers(kind, tmp_path):
    folder = make_checkpoint(tmp_path, kind)
    settings, options = KINDS[kind]
    spec = HeliosSpec.open(Checkpoint(folder))
    fields = GenerationRequest(prompt="a cat", height=HEIGHT, width=WIDTH, frames=33 * CHUNKS, seed=SEED, **settings)
    request = fields.resolve(spec.defaults, {})
    text = TEXT if spec.is_guided(request) else TEXT[:1]
    branches = helios_worker.make_predictor(folder, make_mesh((1, 1, 1), heads=helios_worker.HEADS))
    guide = guide_scaled if spec.config.scaled_guidance else apply_guidance

    def predict(latents, time, history, guidance):
        return np.asarray(guide(branches(latents, time, history, text), guidance))[None]

    generator, chunks, results = torch.Generator().manual_seed(SEED), [], []
    for chunk in range(CHUNKS):
        results += denoise_chunk(predict, spec, request, chunk, generator, chunks)
        chunks.append(results[-1])
    expected = helios_reference.denoise(folder, text, chunks=CHUNKS, seed=SEED, height=HEIGHT, width=WIDTH, **options)
    assert len(results) == len(expected) == spec.experts(request)[-1].stop
    for latents, theirs in zip(results, expected, strict=True):
        assert np.abs(latents - theirs).max() <= 1e-4 * np.abs(theirs).max()
