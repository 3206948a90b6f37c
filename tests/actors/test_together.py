"""Who shares a slice's turn, and whose steps are run in one call."""

import asyncio

import pytest

from actors.errors import RequestFailed, StageLost
from actors.host_values import StepDone
from actors.together import Together
from actors.turn import Turn
from wan_tpu import UnhealthyResult


class Visitors:
    """Tasks that want a turn; each keeps it until it is told to go."""

    def __init__(self, together):
        self.turn = Turn(together)
        self.inside = []
        self._go = {}
        self._tasks = {}

    async def come(self, name, shape):
        async def visit():
            async with self.turn.held(shape):
                self.inside.append(name)
                try:
                    await self._go[name].wait()
                finally:
                    self.inside.remove(name)

        self._go[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(visit())
        await settle()

    async def go(self, name):
        self._go[name].set()
        await self._tasks[name]
        await settle()

    async def cancel(self, name):
        self._tasks[name].cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._tasks[name]
        await settle()


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def within(work):
    return asyncio.run(asyncio.wait_for(work, 20))


def test_a_turn_is_shared_by_one_shape_up_to_the_number():
    async def visit():
        them = Visitors(2)
        for name, shape in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("alone", None)):
            await them.come(name, shape)
        assert them.inside == ["a1", "a2"]
        await them.go("a1")
        assert them.inside == ["a2", "a3"]
        await them.go("a2")
        await them.go("a3")
        assert them.inside == ["alone"]
        await them.come("alone too", None)
        assert them.inside == ["alone"]
        await them.go("alone")
        assert them.inside == ["alone too"]
        await them.go("alone too")
        assert not them.turn.taken()

    within(visit())


def test_nobody_new_joins_once_another_shape_waits():
    async def visit():
        them = Visitors(2)
        await them.come("a1", "a")
        await them.come("b", "b")
        await them.come("a2", "a")
        assert them.inside == ["a1"]  # there is room for a2, but b came first
        await them.go("a1")
        assert them.inside == ["b"]
        await them.go("b")
        assert them.inside == ["a2"]
        await them.go("a2")

    within(visit())


def test_who_is_cancelled_holds_nobody_up():
    async def visit():
        them = Visitors(2)
        await them.come("a1", "a")
        await them.come("b", "b")
        await them.come("a2", "a")
        await them.cancel("b")
        assert them.inside == ["a1", "a2"]
        await them.come("c", "c")
        await them.cancel("a1")
        await them.cancel("a2")
        assert them.inside == ["c"]
        await them.go("c")
        assert not them.turn.taken()

    within(visit())


class Slice:
    """Answers calls as a host does, and remembers which were made; `broken` never gets through a call."""

    def __init__(self):
        self.calls = []
        self.done = {}
        self.room = 9

    async def step(self, keys):
        self.calls.append(sorted(keys))
        await asyncio.sleep(0.01)
        if "lost" in keys:
            raise StageLost("gone")
        if "broken" in keys or len(keys) > self.room:
            raise RequestFailed("step: it doesn't work", "error")
        for key in keys:
            self.done[key] = self.done.get(key, 0) + 1
        return [
            UnhealthyResult("NaN") if key == "nan" else StepDone("denoise_high", self.done[key], 9, 0.0, 0.01)
            for key in keys
        ]


async def steps(together, name, count, program="p"):
    async with together.member(name):
        await asyncio.sleep(0)  # who begins now is there before the first round
        return [await together.step(name, program) for _ in range(count)]


def test_members_are_stepped_together_come_and_go():
    async def run():
        slice_ = Slice()
        together = Together(slice_.step, asyncio.Lock())
        long = asyncio.create_task(steps(together, "long", 6))
        await asyncio.sleep(0.005)  # its first step is under way
        short, other = await asyncio.gather(steps(together, "short", 2), steps(together, "other", 2, "q"))
        return slice_.calls, await long, short, other

    calls, long, short, other = within(run())
    assert calls[0] == ["long"]
    assert calls[1:5] == [["long", "short"], ["other"]] * 2
    assert calls[5:] == [["long"]] * 3
    assert [one.done.step for one in long] == [1, 2, 3, 4, 5, 6]
    assert [one.start_s for one in short] == [one.start_s for one in long[1:3]]
    assert not {one.start_s for one in other} & {one.start_s for one in long}


@pytest.mark.parametrize(("bad", "code"), [("nan", "unhealthy"), ("broken", "error")])
def test_a_poison_request_fails_alone(bad, code):
    async def run():
        slice_ = Slice()
        together = Together(slice_.step, asyncio.Lock())
        found = await asyncio.gather(*(steps(together, name, 3) for name in ("a", bad, "b")), return_exceptions=True)
        return slice_.calls, found

    calls, (a, failed, b) = within(run())
    assert isinstance(failed, RequestFailed)
    assert failed.code == code
    assert [one.done.step for one in a] == [one.done.step for one in b] == [1, 2, 3]
    assert calls[0] == sorted(["a", bad, "b"])
    assert calls[-2:] == [["a", "b"]] * 2  # the others go on together


def test_what_only_fails_together_is_stepped_alone_from_then_on():
    async def run():
        slice_ = Slice()
        slice_.room = 1
        together = Together(slice_.step, asyncio.Lock())
        found = await asyncio.gather(*(steps(together, name, 2) for name in "ab"))
        return slice_.calls, found

    calls, found = within(run())
    assert calls == [["a", "b"], ["a"], ["b"], ["a"], ["b"]]
    assert [[one.done.step for one in member] for member in found] == [[1, 2], [1, 2]]


def test_a_lost_slice_is_everybody_s():
    async def run():
        together = Together(Slice().step, asyncio.Lock())
        return await asyncio.gather(*(steps(together, name, 2) for name in ("a", "lost")), return_exceptions=True)

    assert [type(error) for error in within(run())] == [StageLost, StageLost]


def test_a_cancelled_member_leaves_after_its_step_and_the_others_go_on():
    async def run():
        slice_ = Slice()
        together = Together(slice_.step, asyncio.Lock())
        stays, leaves = (asyncio.create_task(steps(together, name, count)) for name, count in (("a", 3), ("b", 9)))
        await asyncio.sleep(0.005)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        assert slice_.done == {"a": 1, "b": 1}  # none of its steps is running any more
        await stays
        return slice_.calls

    assert within(run()) == [["a", "b"], ["a"], ["a"]]


def test_a_member_that_asks_for_nothing_is_waited_for_until_it_leaves():
    async def run():
        slice_ = Slice()
        together = Together(slice_.step, asyncio.Lock())
        async with together.member("slow"):
            quick = asyncio.create_task(steps(together, "quick", 1))
            await asyncio.sleep(0.03)
            assert slice_.calls == []
            await together.leave("slow")
            await quick
        assert slice_.calls == [["quick"]]

    within(run())
