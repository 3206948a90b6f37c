"""Whether adapters fit a model, found out without its weights."""

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
    model = open_model(Checkpoint(checkpoint))
    mesh = Mesh(np.array(jax.local_devices(backend="cpu")[:1]).reshape(1, 1, 1), AXES)
    for stage in model.spec.denoise_stages:
        mine = [lora for lora in loras if lora.is_for(stage)]
        if mine:
            component = model.components[stage]
            targets = Targets(component, abstract_component(component, "bfloat16", mesh))
            for lora in mine:
                targets.read(lora.path)
