"""What a store of references gives after Ray has restarted it: nothing it had before, and nothing else in its place."""

import asyncio

from actors.slices.references import _RefStoreActor


def test_a_restarted_store_never_takes_one_payload_for_another():
    before, after = _RefStoreActor(), _RefStoreActor()
    embedding = before.put(0, ["a prompt's embedding"])
    assert before.get(0, [embedding]) == {embedding: "a prompt's embedding"}
    state = after.put(0, ["another stage's state"])
    assert after.get(0, [embedding]) == {}
    assert after.get(0, [state]) == {state: "another stage's state"}


def test_nothing_is_kept_of_a_request_that_has_ended():
    store = _RefStoreActor()
    first, second = store.put(0, ["one"]), store.put(0, ["two"])
    store.drop(0, [first])
    assert store.get(0, [first, second]) == {second: "two"}
    store.end(0)
    late = store.put(0, ["of a stage that was cancelled"])
    assert store.get(0, [second, late]) == {}


def test_final_latents_reach_the_decoder_that_waits_for_them():
    async def check():
        store = _RefStoreActor()
        assert await store.wait_for_latents(0, 10.0) == (False, None)
        store.expect_latents(0)
        assert await store.wait_for_latents(0, 0.01) == (True, None)
        waiting = asyncio.create_task(store.wait_for_latents(0, 10.0))
        await asyncio.sleep(0)
        store.offer_latents(0, "latents")
        store.offer_latents(0, "of a second run")
        assert await waiting == (True, "latents") == await store.wait_for_latents(0, 10.0)
        store.expect_latents(0)  # The first ones were lost, and are made again.
        assert await store.wait_for_latents(0, 0.01) == (True, None)
        store.end(0)
        store.expect_latents(0)
        assert await store.wait_for_latents(0, 10.0) == (False, None)

    asyncio.run(check())
