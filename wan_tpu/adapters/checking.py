"""Check whether adapters fit a model, without its weights."""

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from wan_tpu.errors import Unavailable
from wan_tpu.identity import identify
from wan_tpu.requested_adapter import RequestedAdapter
from wan_tpu.storage.addresses import is_bucket

if TYPE_CHECKING:
    from wan_tpu.adapters.adapter import Targets

log = logging.getLogger(__name__)


def check(checkpoint: str, adapters: Iterable[RequestedAdapter]) -> dict[str, tuple[str, ...]]:
    """Read adapters' files; log and return what they ask for that isn't done, by file.

    Raises:
        InvalidRequest: Some tensors don't fit the model's experts; the message names them.
    """
    unmet: dict[str, tuple[str, ...]] = {}
    for adapter in adapters:
        # Nothing is computed, so this machine's accelerators are left to other processes.
        if "jax" not in sys.modules:
            os.environ["JAX_PLATFORMS"] = "cpu"
        experts, encoders = _load_targets(checkpoint)
        stage = next((stage for stage in experts if adapter.is_for(stage)), None)  # The other has the same shapes.
        changed = [*([] if stage is None else [experts[stage]]), *(encoders if adapter.is_for_all else [])]
        read = [targets.read(adapter.path) for targets in changed]
        unmet[adapter.path] = tuple(dict.fromkeys(warning for each in read for warning in each.warnings))
        for warning in unmet[adapter.path]:
            log.warning("%s", warning)
    return unmet


def check_visible(checkpoint: str, adapters: Iterable[RequestedAdapter]) -> dict[str, tuple[str, ...]]:
    """Check the adapters whose files this machine can read now; slices, which may have the other files, check those."""
    unmet: dict[str, tuple[str, ...]] = {}
    for adapter in adapters:
        with contextlib.suppress(Unavailable):
            if Path(adapter.path).exists() or (is_bucket(adapter.path) and identify(adapter.path) is not None):
                unmet |= check(checkpoint, [adapter])
    return unmet


@functools.lru_cache(1)
def _load_targets(checkpoint: str) -> tuple[dict[str, "Targets"], list["Targets"]]:
    """Return the weights that adapters may change: of each expert, and of components of the encoder stage."""
    # Imported here because JAX and torch take seconds to load, and JAX reads the environment when it is imported.
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from wan_tpu.adapters.adapter import Targets
    from wan_tpu.families import open_checkpoint
    from wan_tpu.families.model import open_model
    from wan_tpu.runtime.components import abstract_component
    from wan_tpu.runtime.mesh import AXES

    model = open_model(open_checkpoint(checkpoint))
    mesh = Mesh(np.array(jax.local_devices(backend="cpu")[:1]).reshape(1, 1, 1), AXES)

    @functools.cache
    def load(name: str) -> Targets:
        component = model.components[name]
        return Targets(component, abstract_component(component, "bfloat16", mesh))

    stages = {stage: load(model.same_weights.get(stage, stage)) for stage in model.spec.expert_stages}
    return stages, list(map(load, model.adapted_encoders))
