"""Counts the operations of a request's steps."""

from wan_tpu.families.chunked import ChunkedModel
from wan_tpu.families.model import Model
from wan_tpu.plan import VIDEO, Expert
from wan_tpu.request import ResolvedRequest


def count_step(model: Model, request: ResolvedRequest, expert: Expert, *, images: int) -> int:
    """Return the floating-point operations of one of an expert's steps.

    Args:
        model: The model.
        request: The request.
        expert: The expert.
        images: How many images the request has.
    """
    branches = model.spec.count_evaluations(request, expert)
    if isinstance(model, ChunkedModel):
        return model.count_step(request, expert, branches=branches, images=images)
    return model.flops.step(model.spec.latent_shapes(request, expert.stop)[VIDEO], branches=branches, images=images)
