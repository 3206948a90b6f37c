"""Recognize requests that clients repeat automatically after an error, as OpenAI's client does."""

import hashlib
import time
from collections import deque

from starlette.requests import Request

_COUNT = "x-stainless-retry-count"  # OpenAI's client sends how often it has repeated a request.
_REMEMBERED_S = 120.0
_MAX_REMEMBERED = 10_000


class Retries:
    """The requests that this process has rejected. When they are repeated, no job of an earlier try is looked for.

    A user who sends the same request twice wants two videos. If the second request is rejected and its client repeats
    it, it must not be matched with the job of the first.
    """

    def __init__(self) -> None:
        self._refused: dict[bytes, deque[float]] = {}  # When a try was rejected, by its key.
        self._order: deque[tuple[float, bytes]] = deque()

    def refuse(self, request: Request) -> None:
        """Record that neither this try of a request nor an earlier one was accepted, and that the client knows."""
        now, key = time.monotonic(), _make_key(request, _read_count(request))
        self._forget(now)
        self._refused.setdefault(key, deque()).append(now)
        self._order.append((now, key))

    def repeats(self, request: Request) -> bool:
        """Return whether an earlier try of a request may have been accepted: a try that wasn't rejected is repeated."""
        self._forget(time.monotonic())
        if (count := _read_count(request)) == 0:
            return False
        times = self._refused.get(_make_key(request, count - 1))
        if not times:
            return True
        times.popleft()
        return False

    def _forget(self, now: float) -> None:
        while self._order and (len(self._order) > _MAX_REMEMBERED or self._order[0][0] < now - _REMEMBERED_S):
            then, key = self._order.popleft()
            times = self._refused.get(key, deque())
            if times and times[0] == then:
                times.popleft()
            if not times:
                self._refused.pop(key, None)


def _read_count(request: Request) -> int:
    text = request.headers.get(_COUNT, "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0


def _make_key(request: Request, count: int) -> bytes:
    """Return a key that identifies a try before its body is read."""
    headers = request.headers
    facts = request.url.path, headers.get("authorization", ""), headers.get("content-length", ""), str(count)
    return hashlib.sha256("\0".join(facts).encode()).digest()
