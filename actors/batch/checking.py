"""A manifest's requests planned, and their adapters looked at before anything is computed."""

from wan_tpu.adapters.checking import check_visible
from wan_tpu.lora import Lora
from wan_tpu.plan import RequestPlan
from wan_tpu.request import GenerationRequest
from wan_tpu.spec import ModelSpec


class CheckingPlanner:
    """Plans requests as a model does, and refuses those whose adapters don't fit it. Each adapter is read once.

    An adapter that this machine can't see is left to the slices: they may have it.
    """

    def __init__(self, spec: ModelSpec, checkpoint: str) -> None:
        self._spec, self._checkpoint = spec, checkpoint
        self._checked: set[Lora] = set()

    def __call__(
        self, request: GenerationRequest, *, image: bool, last: bool, picture: tuple[int, int] | None
    ) -> RequestPlan:
        """Return what a request takes; raises `InvalidRequest` where the model can't make it."""
        plan = self._spec.plan(request, image=image, last=last, picture=picture)
        for lora in plan.request.loras:
            if lora not in self._checked:
                check_visible(self._checkpoint, [lora])
                self._checked.add(lora)
        return plan
