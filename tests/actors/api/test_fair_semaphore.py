"""Clients take turns using the processes that read their bodies."""

import asyncio

from actors.api.fair_semaphore import FairSemaphore


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
