"""Plan a manifest's requests and check their adapters before anything is computed."""

from wan_tpu.adapters.checking import check_visible
from wan_tpu.plan import RequestPlan
from wan_tpu.request import GenerationRequest
from wan_tpu.requested_adapter import RequestedAdapter
from wan_tpu.spec import ModelSpec


class CheckingPlanner:
    """Plans requests like a model, and rejects those whose adapters don't fit it. Each adapter is read once.

    Adapters that this machine can't read are checked by the slices, which may have them.
    """

    def __init__(self, spec: ModelSpec, checkpoint: str) -> None:
        self._spec, self._checkpoint = spec, checkpoint
        self._checked: set[RequestedAdapter] = set()

    def __call__(
        self, request: GenerationRequest, *, image: bool, last: bool, picture: tuple[int, int] | None
    ) -> RequestPlan:
        """Return a request's plan; raises `InvalidRequest` if the model can't make it."""
        plan = self._spec.plan(request, image=image, last=last, picture=picture)
        for adapter in plan.request.loras:
            if adapter not in self._checked:
                check_visible(self._checkpoint, [adapter])
                self._checked.add(adapter)
        return plan
