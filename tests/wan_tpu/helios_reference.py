"""diffusers' pipeline of Helios for three sizes, to compare with."""

import diffusers
import torch


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
