"""Who goes first, at a slice's turn and in the lines before it: the most urgent, then who came first."""

import asyncio

import pytest

from actors.errors import StageMoved
from actors.line import Line
from actors.turn import Turn
from tests.actors.test_together import Visitors, settle, within


class Stepper:
    """Requests that step on a turn, and note what was stepped; a step takes three rounds of the loop."""

    def __init__(self, together=1, still=1):
        self.turn = Turn(together, still)
        self.stepped = []
        self.still = []
        self.inside = 0

    def come(self, name, steps, priority=0, shape="s"):
        return asyncio.create_task(self._visit(name, steps, priority, shape))

    async def reach(self, count):
        while len(self.stepped) < count:
            await asyncio.sleep(0)

    async def _visit(self, name, steps, priority, shape):
        async with self.turn.held(shape, priority) as place:
            for step in range(steps):
                if self.turn.wanted(place):
                    self.still.append(name)
                    await self.turn.hold_still(place)
                await self._step(f"{name}{step + 1}")

    async def _step(self, what):
        self.inside += 1
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            self.stepped.append(what)
        finally:
            self.inside -= 1


def test_an_urgent_one_takes_the_turn_between_two_steps():
    async def run():
        them = Stepper()
        low = them.come("low", 4)
        await them.reach(1)
        urgent = them.come("urgent", 2, priority=5)
        await asyncio.gather(low, urgent)
        return them

    them = within(run())
    # The step that ran when it came is done; then it has the turn, and nobody's step is lost or done twice.
    assert them.stepped == ["low1", "low2", "urgent1", "urgent2", "low3", "low4"]
    assert them.still == ["low"]
    assert not them.turn.taken()


def test_the_line_is_by_priority_then_arrival_and_equals_never_overtake():
    async def run():
        them = Stepper()
        first = them.come("a", 3)
        await them.reach(1)
        rest = [them.come(name, 1, priority) for name, priority in (("b", -1), ("c", 0), ("d", 0), ("e", -1))]
        await asyncio.gather(first, *rest)
        return them

    them = within(run())
    assert them.stepped == ["a1", "a2", "a3", "c1", "d1", "b1", "e1"]
    assert them.still == []


def test_who_holds_still_goes_on_before_those_who_came_after_it():
    async def run():
        them = Stepper()
        low = them.come("low", 3)
        await them.reach(1)
        later = them.come("later", 1)
        urgent = them.come("urgent", 1, priority=1)
        await asyncio.gather(low, later, urgent)
        return them.stepped

    assert within(run()) == ["low1", "low2", "urgent1", "low3", "later1"]


def test_no_more_hold_still_than_may():
    async def run(still):
        them = Stepper(still=still)
        tasks = [them.come("low", 3)]
        for i, priority in enumerate((1, 2)):
            await them.reach(1 + 2 * i)
            tasks.append(them.come("p" * priority, 3, priority))
        await asyncio.gather(*tasks)
        return them

    one = within(run(1))
    assert one.still == ["low"]
    assert one.stepped == ["low1", "low2", "p1", "p2", "p3", "pp1", "pp2", "pp3", "low3"]
    assert within(run(2)).still == ["low", "p"]
    assert within(run(0)).still == []


def test_of_several_together_the_least_urgent_makes_room_for_their_own_shape():
    async def run():
        them = Stepper(together=2, still=2)
        tasks = [them.come("a", 4, 1), them.come("b", 4), them.come("c", 4)]
        await them.reach(2)
        tasks.append(them.come("urgent", 2, 3))
        await asyncio.gather(*tasks)
        return them

    them = within(run())
    assert them.still == ["b"]  # c waits; a is more urgent than b
    assert sorted(them.stepped) == sorted([f"{n}{i}" for n in "abc" for i in range(1, 5)] + ["urgent1", "urgent2"])
    assert them.stepped.index("urgent1") < them.stepped.index("a4") < them.stepped.index("b3")  # a leaves: b is first
    assert them.stepped.index("b3") < them.stepped.index("c1")


def test_all_make_room_for_another_shape_or_none_does():
    async def run(priority):
        them = Stepper(together=2, still=2)
        tasks = [them.come("a", 3), them.come("b", 3, 1)]
        await them.reach(2)
        tasks.append(them.come("other", 1, priority, "t"))
        await asyncio.gather(*tasks)
        return them

    assert within(run(1)).still == []  # b is as urgent: there is no turn to be had yet
    them = within(run(2))
    assert sorted(them.still) == ["a", "b"]
    assert set(them.stepped[4:5]) == {"other1"}
    assert len(them.stepped) == len(set(them.stepped)) == 7


def test_who_is_cancelled_while_it_holds_still_is_gone_and_the_others_go_on():
    async def run():
        them = Stepper()
        low = them.come("low", 9)
        await them.reach(1)
        urgent = them.come("urgent", 3, 1)
        await them.reach(3)
        assert them.still == ["low"] and them.turn.taken()
        low.cancel()
        with pytest.raises(asyncio.CancelledError):
            await low
        next_one = them.come("next", 1)
        await asyncio.gather(urgent, next_one)
        assert not them.turn.taken()
        return them.stepped

    assert within(run()) == ["low1", "low2", "urgent1", "urgent2", "urgent3", "next1"]


def test_who_came_urgently_and_is_cancelled_leaves_the_turn_where_it_was():
    async def run():
        them = Stepper()
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


def test_those_that_wait_and_hold_still_are_sent_away_at_once():
    async def run():
        them = Stepper()
        low = them.come("low", 3)
        await them.reach(1)
        urgent = them.come("urgent", 3, 1)
        waits = them.come("waits", 1)
        await them.reach(3)
        them.turn.send_away(lambda: StageMoved("drained"))
        found = await asyncio.gather(low, waits, return_exceptions=True)
        assert not urgent.done()
        await urgent
        return found, them

    found, them = within(run())
    assert [type(error) for error in found] == [StageMoved, StageMoved]
    assert them.stepped == ["low1", "low2", "urgent1", "urgent2", "urgent3"]
    assert not them.turn.taken()


def test_a_turn_without_room_to_hold_still_is_as_before():
    async def run():
        them = Visitors(1)
        await them.come("a", "a")
        await them.come("b", "b")
        await them.go("a")
        assert them.inside == ["b"]
        await them.go("b")

    within(run())


def test_a_line_lets_the_urgent_in_beyond_its_places():
    async def run():
        line, inside, go = Line(2, 1), [], {}

        async def visit(name, priority):
            async with line.place(priority):
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
