"""Where payloads wait between two stages: a stage leaves a reference and gets a ticket, the next one is handed it.

References don't travel through Serve's calls. As results of a stream they were freed while the receiver still had them
(Ray 2.60: `ReferenceCountingAssertionError`, on a busy machine), and as arguments Ray holds them
until the stage ends, long after it has its copy. Here a small actor holds them, given by a plain call of which Ray's
count is exact, until it is told that nobody needs them. Tickets are what streams and brokers see.

The actor belongs to the driver whose requests they are, and ends with it: what a killed driver leaves is freed.
"""

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any

import ray

from actors.errors import InputLost, StageLost
from cluster.placement import off_hosts

ENDED = 10_000  # requests that are remembered to have ended, so that a stage that was cancelled leaves nothing


@dataclass(frozen=True)
class Ticket:
    """Stands for a payload that waits."""

    number: int


class Exchange:
    """One driver's exchange."""

    def __init__(self) -> None:
        kind = ray.remote(_ExchangeActor).options(
            num_cpus=0, max_restarts=-1, max_task_retries=-1, label_selector=off_hosts()
        )
        self._actor = kind.remote()
        self._shelves = itertools.count()

    def shelf(self) -> "Shelf":
        """Return a place for one request's payloads; call its `end` when the request has ended."""
        return Shelf(self._actor, next(self._shelves))


class Shelf:
    """Holds one request's payloads; picklable, stages are given it."""

    def __init__(self, actor: Any, number: int) -> None:
        self._actor, self._number = actor, number

    async def put(self, ref: ray.ObjectRef) -> Ticket:
        """Leave a payload here. Ray takes the caller's word for it until this returns."""
        return Ticket(await self._actor.put.remote(self._number, [ref]))

    async def get(self, *tickets: Ticket | None) -> list[ray.ObjectRef | None]:
        """Return the references of some tickets, of None None. They hold until the tickets are dropped.

        Raises `InputLost` when one is not there (any more).
        """
        numbers = [ticket.number for ticket in tickets if ticket is not None]
        found = await self._actor.get.remote(self._number, numbers)
        if len(found) < len(numbers):
            raise InputLost(f"{len(numbers) - len(found)} of {len(numbers)} payloads are not on the exchange any more")
        refs = iter(found)
        return [None if ticket is None else next(refs) for ticket in tickets]

    async def check(self) -> None:
        """Raise `StageLost` when the driver is gone, and with it everybody who waits for this request."""
        try:
            await self._actor.ping.remote()
        except ray.exceptions.RayActorError:
            raise StageLost("the driver of this request is gone") from None

    def drop(self, *tickets: Ticket | None) -> None:
        """Let go of payloads that nobody needs any more; doesn't wait."""
        self._actor.drop.remote(self._number, [ticket.number for ticket in tickets if ticket is not None])

    def end(self) -> None:
        """Let go of all, and of what comes later; doesn't wait."""
        self._actor.end.remote(self._number)


class _ExchangeActor:
    def __init__(self) -> None:
        self._shelves: dict[int, dict[int, ray.ObjectRef]] = {}
        self._ended: deque[int] = deque(maxlen=ENDED)
        self._numbers = itertools.count()

    def put(self, shelf: int, refs: list[ray.ObjectRef]) -> int:
        number = next(self._numbers)
        if shelf not in self._ended:
            self._shelves.setdefault(shelf, {})[number] = refs[0]
        return number

    def get(self, shelf: int, numbers: list[int]) -> list[ray.ObjectRef]:
        there = self._shelves.get(shelf, {})
        return [there[number] for number in numbers if number in there]

    def ping(self) -> None:
        """Answer."""

    def drop(self, shelf: int, numbers: list[int]) -> None:
        for number in numbers:
            self._shelves.get(shelf, {}).pop(number, None)

    def end(self, shelf: int) -> None:
        self._shelves.pop(shelf, None)
        self._ended.append(shelf)
