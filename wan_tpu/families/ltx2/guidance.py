"""Guidance of LTX-2: which evaluations a step needs, and how they are combined. Imports no JAX and no torch.

Shapes: E evaluations, L tokens, C channels.
"""

from dataclasses import dataclass, replace
from typing import Any

from wan_tpu.families.ltx2.config import Ltx2Config, is_23


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of the transformer.

    Attributes:
        text: Which text it uses: 0 for the prompt, 1 for the negative prompt.
        perturbed_blocks: The layers whose self-attention is skipped, so that values pass through unmixed.
        is_isolated: Whether video and sound don't attend to each other.
    """

    text: int = 0
    perturbed_blocks: tuple[int, ...] = ()
    is_isolated: bool = False

    def is_perturbed(self, layer: Any) -> Any:
        """Return whether a layer, whose index may be traced, is one of those; None where there are none."""
        return sum(layer == block for block in self.perturbed_blocks) > 0 if self.perturbed_blocks else None


@dataclass(frozen=True)
class Guidance:
    """The strengths of a model's guidance in addition to a request's `guidance_scale`, which is the video's.

    Attributes:
        audio_scale: The scale of the sound.
        perturbation: The scale of guidance away from perturbed layers (STG); 0 for none.
        modality: The scale of guidance away from video and sound that don't attend to each other.
        rescale: How much of the deviation of the prompt's own clean estimate is restored.
        image_noise: The part of a step's noise that an image's tokens count with when the deviations are measured.
    """

    audio_scale: float
    perturbation: float
    modality: float
    rescale: float
    image_noise: float = 0.0


# Lightricks' settings for all versions since 2026-03-04: ltx_pipelines/utils/constants.py of ltx-pipelines 1.0.0. An
# image's tokens have timestep 0 there, and so are clean: `X0Model` of ltx_core/model/transformer/model.py, ltx-core
# 1.0.0.
_LIGHTRICKS = Guidance(audio_scale=7.0, perturbation=1.0, modality=3.0, rescale=0.7)
# diffusers 0.42.1 has the same defaults, and takes an image's tokens to be as noisy as all others. Its transformer
# perturbs no layer of LTX-2.0.
_DIFFUSERS_23 = replace(_LIGHTRICKS, image_noise=1.0)
_DIFFUSERS_20 = replace(_DIFFUSERS_23, perturbation=0.0)
# The layers, of 48, that are perturbed in LTX-2.0 and in LTX-2.3, from the same file of ltx-pipelines.
_PERTURBED_20, _PERTURBED_23 = 29, 28


def guidance_of(config: Ltx2Config, *, follows_diffusers: bool) -> Guidance:
    """Return the guidance of a model by the rules of its authors or of diffusers."""
    if not follows_diffusers:
        return _LIGHTRICKS
    return _DIFFUSERS_23 if config.transformer["perturbed_attn"] else _DIFFUSERS_20


def evaluations(config: Ltx2Config, count: int) -> tuple[Evaluation, ...]:
    """Return the evaluations of a step: the prompt's, the negative prompt's, of four the perturbed one, the isolated.

    Args:
        config: The model's configuration.
        count: How many there are: one without guidance, otherwise three or four.
    """
    layers = config.transformer["num_layers"]
    block = (_PERTURBED_23 if is_23(config) else _PERTURBED_20) * layers // 48
    perturbed = (Evaluation(perturbed_blocks=(block,)),) * (count - 3)
    return (Evaluation(), Evaluation(1), *perturbed, Evaluation(is_isolated=True))[:count]


def combine(velocities: Any, latents: Any, sigma: Any, scales: Any, noise: Any) -> Any:
    """Return the guided velocity [L, C] of several evaluations, as Lightricks' and diffusers' pipelines combine them.

    Every evaluation pushes the clean estimate of the first one away from its own; then the result is pulled back to the
    deviation that the first one had.

    Args:
        velocities: Float32 [E, L, C]; the first is the prompt's.
        latents: Float32 [L, C].
        sigma: The step's noise level.
        scales: Float32 [E]: how strongly each other evaluation pushes, and last how much is pulled back.
        noise: The noise level that the tokens are taken to have, a scalar or [L, 1].
    """
    if len(velocities) == 1:
        return velocities[0]
    clean = latents - noise * velocities
    guided = clean[0] + sum(scales[i - 1] * (clean[0] - clean[i]) for i in range(1, len(clean)))
    rescaled = guided * (clean[0].std(ddof=1) / guided.std(ddof=1))
    return (latents - (scales[-1] * rescaled + (1 - scales[-1]) * guided)) / sigma
