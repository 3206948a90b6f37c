"""Payloads through a real object store: the same bits, read where they lie."""

import asyncio
import contextlib

import ml_dtypes
import numpy as np
import pytest
import ray

from actors.errors import InputLost
from actors.slices.payloads import EncodedVideo, Payload, TextEmbedding, mp4, pack, unpack
from actors.slices.references import RefStore
from cluster.connect import connect, leave
from tests.waiting import wait_for
from wan_tpu.data import DenoiseState, ImageCondition

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def store(three_slices):
    """The object store of a cluster's head."""
    connect(three_slices.address)
    yield
    leave()


def array(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


VALUES = {
    "text": TextEmbedding({"text": array(1, 512, 256, dtype=ml_dtypes.bfloat16), "length": array(1)}),
    "image": ImageCondition(array(1, 257, 320, dtype=ml_dtypes.bfloat16), array(1, 20, 3, 60, 104)),
    "images read with the prompt": ImageCondition(
        None,
        array(1, 24, 2, 48, 84),
        prompt={
            "text": array(1, 600, 256, dtype=ml_dtypes.bfloat16),
            "count": np.array([[530]], np.int32),
            "anchors": np.array([[0, 1]], np.int32),
        },
    ),
    "no features": ImageCondition(None, array(1, 20, 3, 60, 104)),
    "state": DenoiseState(array(1, 16, 3, 60, 104), tuple(array(1, 16, 3, 60, 104) for _ in range(3)), 7),
    "last state": DenoiseState(array(1, 16, 3, 60, 104), (), 40),
    "state of the caller's noise": DenoiseState(array(1, 16, 3, 60, 104), (), 2, own_noise=True),
    "video": mp4(RNG.bytes(300_000)),
}


def arrays_of(value):
    fields = vars(value).values()
    parts = (x.values() if isinstance(x, dict) else x if isinstance(x, tuple) else (x,) for x in fields)
    return [x for content in parts for x in content if x is not None]


@pytest.mark.long
@pytest.mark.parametrize("name", VALUES)
def test_values_come_out_of_the_store_as_views_with_the_same_bits(name, store):
    value = VALUES[name]
    reference = ray.put(pack(value))
    got, again = unpack(ray.get(reference)), unpack(ray.get(reference))
    assert type(got) is type(value)
    for stored, first, twin in zip(*map(arrays_of, (value, got, again)), strict=True):
        if not isinstance(stored, np.ndarray):
            assert stored == first  # The step, or whose the noise was.
            continue
        assert first.dtype == stored.dtype
        assert np.array_equal(first.view(np.uint8), stored.view(np.uint8))
        assert not first.flags.writeable
        # The store's own memory: both views lie at one address, which is not that of what was put in.
        assert first.ctypes.data == twin.ctypes.data != stored.ctypes.data


def test_packing_copies_nothing():
    values = VALUES["text"].values["text"]
    assert np.shares_memory(pack(VALUES["text"]).arrays["values.text"], values)
    assert np.shares_memory(unpack(pack(VALUES["text"])).values["text"], values)
    assert bytes(unpack(pack(mp4(b"abc"))).mp4) == b"abc"
    assert isinstance(VALUES["video"], EncodedVideo)


def test_the_size_and_the_step_are_known_without_looking_inside():
    payload = pack(VALUES["state"])
    assert (payload.step, payload.nbytes) == (7, 4 * 16 * 3 * 60 * 104 * 4)


@pytest.mark.parametrize("wrong", [np.zeros(3), None, Payload("Conditioning", {})])
def test_anything_else_is_refused(wrong):
    with pytest.raises(TypeError):
        unpack(wrong)


@pytest.mark.long
def test_adopted_payload_outlives_the_leader_that_created_it(store):
    class Leader:
        """Leaves payloads as a slice's leader does, whose hosts make them: it is their owner."""

        async def leave(self, scope, payload, adopted):
            reference = ray.remote(lambda: payload).remote()
            await reference  # An adoption waits for the value, but not for a worker that has yet to start.
            handle = await scope.put(reference)
            if adopted:
                await scope.adopt(handle)
            return handle

    scope, payload = RefStore().open_scope(), pack(VALUES["state"])
    leader = ray.remote(Leader).remote()
    lost, adopted, dropped = ray.get([leader.leave.remote(scope, payload, adopted) for adopted in (False, True, True)])

    async def fetch(*handles):
        return await asyncio.gather(*await scope.get(*handles))

    def is_lost():
        with contextlib.suppress(ray.exceptions.OwnerDiedError):
            asyncio.run(fetch(lost))
            return False
        return True

    def is_dead(actor):
        try:
            ray.get(actor.__ray_ready__.remote())
        except ray.exceptions.RayActorError:
            return True
        return False

    scope.drop(dropped)
    ray.kill(leader)
    wait_for(lambda: is_dead(leader), "the leader ends")  # A value that is read before is kept here, and isn't lost.
    wait_for(is_lost, "it goes with its owner")
    with pytest.raises(InputLost):
        asyncio.run(fetch(dropped))
    [value] = asyncio.run(fetch(adopted))
    assert unpack(value).step == VALUES["state"].step
    asyncio.run(scope.adopt(lost))  # nothing to be done
    scope.close()
