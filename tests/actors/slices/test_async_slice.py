"""Work that others cancel again and again."""

import asyncio

import pytest

from actors.slices.async_slice import wait_despite_cancellation


def test_call_runs_to_its_end_however_often_it_is_cancelled():
    """As arrays are dropped: a second cancel would leave them on the devices of a slice for ever."""

    async def run():
        go, done = asyncio.Event(), []

        async def work():
            await go.wait()
            done.append(True)

        waiting = asyncio.create_task(wait_despite_cancellation(work()))
        for _ in range(3):
            await asyncio.sleep(0.01)
            waiting.cancel()
        await asyncio.sleep(0.01)
        assert not waiting.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert done

    asyncio.run(run())
