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


def check(checkpoint: str, adapters: Iterable[RequestedAdapter]) -> None:
    """Read adapters' files, and log what they ask for that isn't done.

    Raises:
        InvalidRequest: Some tensors don't fit the model's experts; the message names them.
    """
    for adapter in adapters:
        # Nothing is computed, so this machine's accelerators are left to other processes.
        if "jax" not in sys.modules:
            os.environ["JAX_PLATFORMS"] = "cpu"
        for stage, targets in _load_targets(checkpoint).items():
            if adapter.is_for(stage):
                for warning in targets.read(adapter.path).warnings:
                    log.warning("%s", warning)
                break  # The other expert has the same shapes.


def check_visible(checkpoint: str, adapters: Iterable[RequestedAdapter]) -> None:
    """Check the adapters whose files this machine can read now; slices, which may have the other files, check those."""
    for adapter in adapters:
        with contextlib.suppress(Unavailable):
            if Path(adapter.path).exists() or (is_bucket(adapter.path) and identify(adapter.path) is not None):
                check(checkpoint, [adapter])


@functools.lru_cache(1)
def _load_targets(checkpoint: str) -> dict[str, "Targets"]:
    """Return the weights that adapters may change, for each of a model's experts."""
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
    components = {stage: model.components[stage] for stage in model.spec.denoise_stages}
    return {
        stage: Targets(component, abstract_component(component, "bfloat16", mesh))
        for stage, component in components.items()
    }
