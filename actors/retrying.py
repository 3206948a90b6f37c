"""Try again what fails while the database, the storage or this machine is unavailable."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
FIRST_PAUSE_S = 0.5


def back_off(longest_s: float) -> Iterator[float]:
    """Yield pauses without end, each twice as long as the one before, up to the longest."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)


async def retry(
    work: Callable[[], Awaitable[T]],
    errors: tuple[type[Exception], ...],
    pauses_s: Iterable[float],
    note: Callable[[Exception, float], Awaitable[None]],
) -> T:
    """Return what work returns, which is repeated after each pause if it fails.

    Args:
        pauses_s: The pauses. After the last one, an error passes through.
        note: Called with each error and the pause that follows. It raises the error if repeating is of no use.
    """
    for pause_s in pauses_s:
        try:
            return await work()
        except errors as error:
            await note(error, pause_s)
        await asyncio.sleep(pause_s)
    return await work()
