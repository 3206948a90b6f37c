"""What diffusers' Helios pipelines compute, step by step, to compare with."""

import diffusers
import torch

from tests.wan_tpu.diffusers_steps import keep_latents


class PyramidPipeline(diffusers.HeliosPyramidPipeline):
    """diffusers' pipeline with the covariance of its noise factored in float64.

    In float32 the CPU's factorisation refuses the published gamma, whose smallest eigenvalue is rounded below 0.
    """

    def sample_block_noise(self, *args, **options):
        """Draw the noise between stages."""
        factorise = torch.linalg.cholesky
        torch.linalg.cholesky = lambda covariance: factorise(_covariance(self, len(covariance))).float()
        try:
            return super().sample_block_noise(*args, **options)
        finally:
            torch.linalg.cholesky = factorise


def _covariance(pipeline, values):
    gamma, ones = pipeline.scheduler.config.gamma, torch.ones(values, values, dtype=torch.float64)
    return torch.eye(values, dtype=torch.float64) * (1 + gamma + 1e-8) - ones * gamma


def denoise(folder, text, *, chunks, seed, **options):
    """Return the latents after each step of all chunks, float32 [1, C, T, H, W].

    Args:
        folder: A checkpoint's.
        text: [1 or 2, L, C]: the embeddings of the prompt, and of the negative prompt.
        chunks: How many chunks the video has.
        seed: The seed of its noise.
        options: Further arguments of the pipeline.
    """
    pyramid = "Pyramid" in diffusers.DiffusionPipeline.load_config(folder)["_class_name"]
    pipeline = (PyramidPipeline if pyramid else diffusers.HeliosPipeline).from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    # Latents are compared, and decoding every chunk takes longer than making it.
    pipeline.vae.decode = lambda latents, return_dict: (latents,)
    results = []

    embeddings = torch.from_numpy(text).split(1)
    pipeline(
        prompt_embeds=embeddings[0],
        negative_prompt_embeds=embeddings[1] if len(embeddings) > 1 else None,
        num_frames=33 * chunks,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
        callback_on_step_end=keep_latents(results),
        **options,
    )
    return results
