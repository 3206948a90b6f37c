"""Who goes first, on a slice and in the queues before it: the most urgent, then who came first."""

import asyncio

import pytest

from actors.errors import StageMoved
from actors.slices.scheduler import PriorityQueue, StepScheduler


def within(work):
    return asyncio.run(asyncio.wait_for(work, 20))


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


class Slice:
    """Requests that step on a slice, and note what was stepped; a step takes three rounds of the loop."""

    def __init__(self, max_paused=1):
        self.scheduler = StepScheduler(max_paused)
        self.stepped = []
        self.paused = []
        self.inside = 0

    def nothing_is_left(self):
        scheduler, device = self.scheduler, self.scheduler.device
        return not any((scheduler._inside, scheduler._waiting, scheduler._paused, device._inside, device._waiting))

    def come(self, name, steps, priority=0):
        return asyncio.create_task(self._visit(name, steps, priority))

    async def reach(self, count):
        while len(self.stepped) < count:
            await asyncio.sleep(0)

    async def _visit(self, name, steps, priority):
        async with self.scheduler.enter(priority) as admission:
            for step in range(steps):
                if self.scheduler.must_pause(admission):
                    self.paused.append(name)
                    await self.scheduler.pause(admission)
                async with self.scheduler.device.enter(priority):
                    await self._step(f"{name}{step + 1}")

    async def _step(self, step):
        self.inside += 1
        assert self.inside == 1, "two requests step at once"
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            self.stepped.append(step)
        finally:
            self.inside -= 1


def test_an_urgent_one_runs_between_two_steps():
    async def run():
        them = Slice()
        low = them.come("low", 4)
        await them.reach(1)
        urgent = them.come("urgent", 2, priority=5)
        await asyncio.gather(low, urgent)
        return them

    them = within(run())
    # The step that ran when it came is done; then it runs, and nobody's step is lost or done twice.
    assert them.stepped == ["low1", "low2", "urgent1", "urgent2", "low3", "low4"]
    assert them.paused == ["low"]
    assert them.nothing_is_left()


def test_order_is_by_priority_then_arrival_and_equals_never_overtake():
    async def run():
        them = Slice()
        first = them.come("a", 3)
        await them.reach(1)
        rest = [them.come(name, 1, priority) for name, priority in (("b", -1), ("c", 0), ("d", 0), ("e", -1))]
        await asyncio.gather(first, *rest)
        return them

    them = within(run())
    assert them.stepped == ["a1", "a2", "a3", "c1", "d1", "b1", "e1"]
    assert them.paused == []


def test_a_paused_one_goes_on_before_those_who_came_after_it():
    async def run():
        them = Slice()
        low = them.come("low", 3)
        await them.reach(1)
        later = them.come("later", 1)
        urgent = them.come("urgent", 1, priority=1)
        await asyncio.gather(low, later, urgent)
        return them.stepped

    assert within(run()) == ["low1", "low2", "urgent1", "low3", "later1"]


def test_no_more_are_paused_than_may():
    async def run(max_paused):
        them = Slice(max_paused)
        tasks = [them.come("low", 3)]
        for i, priority in enumerate((1, 2)):
            await them.reach(1 + 2 * i)
            tasks.append(them.come("p" * priority, 3, priority))
        await asyncio.gather(*tasks)
        return them

    slice_ = within(run(1))
    assert slice_.paused == ["low"]
    assert slice_.stepped == ["low1", "low2", "p1", "p2", "p3", "pp1", "pp2", "pp3", "low3"]
    assert within(run(2)).paused == ["low", "p"]
    assert within(run(0)).paused == []


def test_request_cancelled_while_paused_is_gone_and_the_others_go_on():
    async def run():
        them = Slice()
        low = them.come("low", 9)
        await them.reach(1)
        urgent = them.come("urgent", 3, 1)
        await them.reach(3)
        assert them.paused == ["low"] and not them.nothing_is_left()
        low.cancel()
        with pytest.raises(asyncio.CancelledError):
            await low
        next_one = them.come("next", 1)
        await asyncio.gather(urgent, next_one)
        assert them.nothing_is_left()
        return them.stepped

    assert within(run()) == ["low1", "low2", "urgent1", "urgent2", "urgent3", "next1"]


def test_cancelled_urgent_request_leaves_the_slice_to_the_other():
    async def run():
        them = Slice()
        low = them.come("low", 3)
        await them.reach(1)
        urgent = them.come("urgent", 9, 1)
        await them.reach(4)
        urgent.cancel()
        await low
        return them

    them = within(run())
    assert them.stepped == ["low1", "low2", "urgent1", "urgent2", "low3"]
    assert them.inside == 0


def test_those_that_wait_or_are_paused_are_evicted_at_once():
    async def run():
        them = Slice()
        low = them.come("low", 3)
        await them.reach(1)
        urgent = them.come("urgent", 3, 1)
        waits = them.come("waits", 1)
        await them.reach(3)
        them.scheduler.evict(lambda: StageMoved("drained"))
        errors = await asyncio.gather(low, waits, return_exceptions=True)
        assert not urgent.done()
        await urgent
        return errors, them

    errors, them = within(run())
    assert [type(error) for error in errors] == [StageMoved, StageMoved]
    assert them.stepped == ["low1", "low2", "urgent1", "urgent2", "urgent3"]
    assert them.nothing_is_left()


def test_a_queue_lets_the_urgent_in_beyond_its_limit():
    async def run():
        queue, inside, go = PriorityQueue(2, 1), [], {}

        async def visit(name, priority):
            async with queue.enter(priority):
                inside.append(name)
                await go[name].wait()
                inside.remove(name)

        tasks = {}
        for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 1), ("e", 2), ("f", 1)):
            go[name] = asyncio.Event()
            tasks[name] = asyncio.create_task(visit(name, priority))
            await settle()
        assert inside == ["a", "b", "d"]  # c is no more urgent than a; d is; then it is full for e too
        tasks["c"].cancel()
        for name, then in (("b", "ade"), ("a", "de"), ("d", "ef")):
            go[name].set()
            await settle()
            assert "".join(inside) == then, name
        for event in go.values():
            event.set()
        await asyncio.gather(*(task for name, task in tasks.items() if name != "c"))
        assert inside == []

    within(run())
