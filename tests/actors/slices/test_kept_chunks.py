"""The latents of a chunk are copied to the store's node: a decoder that begins again finds them, whoever is lost."""

import asyncio

import numpy as np
import pytest
import ray

from actors.slices.references import RefStore
from cluster.connect import connect, leave
from tests.waiting import SECONDS

pytestmark = pytest.mark.thorough

LATENTS = np.arange(300_000, dtype=np.float32)  # Too much for Ray to send it with the reference.


@ray.remote(num_cpus=0)
class Denoiser:
    """Owns what it has computed, as a slice's host does."""

    async def put_chunk(self, scope, chunk):
        ref = ray.put(LATENTS + chunk)
        await scope.put_chunk(chunk, ref)


@pytest.fixture
def slices(three_slices):
    connect(three_slices.address)
    yield three_slices
    leave()


def test_chunks_outlive_the_node_that_denoised_them(slices):
    name = slices.slices[0].name
    denoiser = Denoiser.options(label_selector={"ray.io/tpu-slice-name": name}).remote()
    scope = RefStore().open_scope()

    async def check():
        for chunk in range(2):
            await denoiser.put_chunk.remote(scope, chunk)
        await asyncio.sleep(2)  # Nobody waits for the copies.
        slices.kill_host(name, 0)
        with pytest.raises(ray.exceptions.RayActorError):
            await denoiser.put_chunk.remote(scope, 2)
        for chunk in range(2):
            ref = await asyncio.wait_for(scope.find_chunk(chunk), SECONDS)
            assert np.array_equal(await asyncio.wait_for(ref, SECONDS), LATENTS + chunk)
        assert await scope.find_chunk(2) is None

    try:
        asyncio.run(check())
    finally:
        scope.close()
        slices.add_host(name, 0)
