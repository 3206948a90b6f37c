"""Look names up in threads of their own, so that one owner's slow names delay nobody else's."""

import asyncio
import functools
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

_THREADS = 32  # Concurrent look-ups in this process.
_THREADS_OF_AN_OWNER = 8  # Of these, one owner's. A name server that never answers blocks each for some ten seconds.


def look_up_with_system(host: str, port: int) -> list[str]:
    """Return all addresses of a name from the system's resolver, which may take many seconds; raises `OSError`."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


class Resolver:
    """Looks names up in a bounded number of threads, which owners get in turn. It may be used from any event loop.

    The system's look-up can't be interrupted, so a thread counts until it has ended, even if nobody waits for it any
    more. Threads are daemons, so that a slow name doesn't delay the end of the process.
    """

    def __init__(
        self,
        threads: int = _THREADS,
        threads_of_an_owner: int = _THREADS_OF_AN_OWNER,
        look_up: Callable[[str, int], list[str]] = look_up_with_system,
    ) -> None:
        self._free, self._of_an_owner, self._look_up = threads, threads_of_an_owner, look_up
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Lookup]] = {}
        self._running: dict[str, int] = {}

    async def resolve(self, host: str, port: int, owner: str) -> list[str]:
        """Return all addresses of a name; raises `OSError` if it has none.

        Args:
            host: The name.
            port: The port to connect to.
            owner: Who the name is looked up for, such as the id of an API key.
        """
        lookup = _Lookup(owner, host, port)
        with self._lock:
            self._waiting.setdefault(owner, deque()).append(lookup)
        self._start_waiting()
        return await asyncio.wrap_future(lookup.addresses)

    def _start_waiting(self) -> None:
        while (lookup := self._take_next()) is not None:
            threading.Thread(target=self._run, args=(lookup,), name="resolver", daemon=True).start()

    def _take_next(self) -> "_Lookup | None":
        """Return the next look-up: of the owner with the fewest threads; among equals, of that served longest ago."""
        with self._lock:
            while self._free:
                owners = [owner for owner in self._waiting if self._running.get(owner, 0) < self._of_an_owner]
                if not owners:
                    return None
                owner = min(owners, key=lambda owner: self._running.get(owner, 0))
                queue = self._waiting.pop(owner)
                lookup = queue.popleft()
                if queue:
                    self._waiting[owner] = queue  # Behind all other owners.
                if lookup.addresses.set_running_or_notify_cancel():  # False if nobody waits for it any more.
                    self._free -= 1
                    self._running[owner] = self._running.get(owner, 0) + 1
                    return lookup
            return None

    def _run(self, lookup: "_Lookup") -> None:
        try:
            addresses, failure = self._look_up(lookup.host, lookup.port), None
        except Exception as error:  # Raised where the addresses are awaited.
            addresses, failure = [], error
        with self._lock:
            self._free += 1
            self._running[lookup.owner] -= 1
            if not self._running[lookup.owner]:
                del self._running[lookup.owner]
        if failure is None:
            lookup.addresses.set_result(addresses)
        else:
            lookup.addresses.set_exception(failure)
        self._start_waiting()


class _Lookup:
    def __init__(self, owner: str, host: str, port: int) -> None:
        self.owner, self.host, self.port = owner, host, port
        self.addresses: Future[list[str]] = Future()


@functools.cache
def get_resolver() -> Resolver:
    """Return the resolver that the whole process shares, so that its threads are limited together."""
    return Resolver()
