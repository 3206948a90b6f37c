"""Clients take turns using the processes that read their bodies."""

import asyncio

from actors.api.fair_semaphore import FairSemaphore


def test_heavy_key_waits_for_those_that_have_used_little():
    """Ann sends eight requests first. Bob's only one, sent last, just waits for a place."""
    order = []

    async def take(turns, key, seconds):
        async with turns.take_turn(key):
            await asyncio.sleep(seconds)
            order.append(key)

    async def all_():
        turns = FairSemaphore(2, 1)
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(take(turns, "ann", 0.1))
            await asyncio.sleep(0.25)  # Two of Ann's are done.
            group.create_task(take(turns, "bob", 0.01))
            waits = group.create_task(take(turns, "cleo", 0.01))
            await asyncio.sleep(0)
            waits.cancel()

    asyncio.run(all_())
    assert order.index("bob") <= 3 and order.count("ann") == 8 and "cleo" not in order


def test_request_cancelled_while_a_place_gets_free_takes_none():
    async def all_():
        turns, order = FairSemaphore(1, 1), []

        async def take(key):
            async with turns.take_turn(key):
                order.append(key)

        async with turns.take_turn("ann"):
            cancelled = asyncio.create_task(take("bob"))
            await asyncio.sleep(0)
            cancelled.cancel()  # The place is free before Bob's task runs again.
        await asyncio.wait([cancelled])
        async with asyncio.timeout(5):
            await take("cleo")
        return order, cancelled.cancelled()

    assert asyncio.run(all_()) == (["cleo"], True)
