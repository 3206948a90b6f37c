"""One of two processes that read a converted checkpoint, each for four of eight devices. Run by test_converted.py.

Arguments: rank, the coordinator's address, the checkpoint, its original. Prints bytes read and bytes of own shards.
"""

import sys

import jax
import numpy as np

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.model import open_model
from wan_tpu.progress import Silent
from wan_tpu.runtime.components import load_component, open_component
from wan_tpu.runtime.mesh import make_mesh

rank, coordinator, converted, original = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, 2, int(rank))
model, read = open_model(Checkpoint(converted)), []
mesh = make_mesh((1, 2, 4), heads=model.spec.heads)
own = 0
for component in model.components.values():

    def show(total):
        read.append(total)
        return Silent()

    loaded = load_component(Checkpoint(converted), component, "bfloat16", mesh, show)
    expected = load_component(Checkpoint(original), component, "bfloat16", mesh)
    assert loaded.params.keys() == expected.params.keys()
    stored = open_component(Checkpoint(converted), component, "bfloat16", mesh).weights
    for name, array in loaded.params.items():
        shards = {str(shard.index): np.asarray(shard.data) for shard in array.addressable_shards}
        for shard in expected.params[name].addressable_shards:
            assert np.array_equal(shards[str(shard.index)], np.asarray(shard.data)), name
        own += sum(shard.nbytes for shard in shards.values()) if name in stored else 0
print(sum(read), own)
jax.distributed.shutdown()  # Waits for the other process, which would take this one's end for its death.
