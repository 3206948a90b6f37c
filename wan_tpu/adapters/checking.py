"""Whether adapters fit a model, found out without its weights."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from wan_tpu.adapters.adapter import Targets
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.model import open_model
from wan_tpu.lora import Lora
from wan_tpu.runtime.components import abstract_component
from wan_tpu.runtime.mesh import AXES


def check(checkpoint: str, loras: Sequence[Lora]) -> None:
    """Read adapters' files; raises `InvalidRequest` naming the tensors that don't fit the model's experts."""
    targets = _targets(checkpoint)
    for lora in loras:
        for stage in targets:
            if lora.is_for(stage):
                targets[stage].read(lora.path)
                break  # the other expert has the same shapes


@functools.lru_cache(1)
def _targets(checkpoint: str) -> dict[str, Targets]:
    """Return what adapters may change of each of a model's experts."""
    model = open_model(Checkpoint(checkpoint))
    mesh = Mesh(np.array(jax.local_devices(backend="cpu")[:1]).reshape(1, 1, 1), AXES)
    components = {stage: model.components[stage] for stage in model.spec.denoise_stages}
    return {
        stage: Targets(component, abstract_component(component, "bfloat16", mesh))
        for stage, component in components.items()
    }
