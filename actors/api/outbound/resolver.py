"""Look names up in threads of their own, so that one owner's slow names delay nobody else's."""

import asyncio
import contextlib
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from actors.api.fair_semaphore import FairSemaphore

_THREADS = 32  # Concurrent look-ups in this process.
_THREADS_OF_AN_OWNER = 8  # Of these, one owner's. A name server that never answers blocks each for some ten seconds.


def look_up_with_system(host: str, port: int) -> list[str]:
    """Return all addresses of a name from the system's resolver, which may take many seconds; raises `OSError`."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


class Resolver:
    """Looks names up in a bounded number of threads, which owners get in turn. It belongs to one event loop.

    The system's look-up can't be interrupted, so a thread counts until it has ended, even if nobody waits for it any
    more. Threads are daemons, so that a slow name doesn't delay the end of the process.
    """

    def __init__(
        self,
        threads: int = _THREADS,
        threads_of_an_owner: int = _THREADS_OF_AN_OWNER,
        look_up: Callable[[str, int], list[str]] = look_up_with_system,
    ) -> None:
        self.turns, self._look_up = FairSemaphore(threads, threads_of_an_owner), look_up

    async def resolve(self, host: str, port: int, owner: str) -> list[str]:
        """Return all addresses of a name, looked up for an owner such as a key; raises `OSError` if it has none."""
        await self.turns.enter(owner)
        addresses, loop, start = Future[list[str]](), asyncio.get_running_loop(), time.monotonic()
        addresses.set_running_or_notify_cancel()  # From here on, it can't be cancelled.

        def run() -> None:
            try:
                addresses.set_result(self._look_up(host, port))
            except Exception as error:  # Raised where the addresses are awaited.
                addresses.set_exception(error)
            with contextlib.suppress(RuntimeError):  # The loop has ended.
                loop.call_soon_threadsafe(self.turns.leave, owner, time.monotonic() - start)

        threading.Thread(target=run, name="resolver", daemon=True).start()
        return await asyncio.wrap_future(addresses)


_RESOLVERS = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Resolver]()


def get_resolver() -> Resolver:
    """Return the resolver of the running event loop, of which a process has one, so that all threads are limited."""
    return _RESOLVERS.setdefault(asyncio.get_running_loop(), Resolver())
