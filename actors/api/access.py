"""Who may ask, and how often: the keys in force, and a rate for each."""

import os
import threading
import time
from pathlib import Path

from actors.api.keys import ENVIRONMENT, ApiKey, KeysError, list_keys, matching, parse_keys

_LOOK_EVERY_S = 1.0  # at the key file, for what was added or revoked
BURST_S = 10.0  # a key may ask as often as in so many seconds at once


class Refused(Exception):
    """A request that isn't let in."""


class UnknownKey(Refused):
    """No key, or none that is in force."""


class TooMany(Refused):
    """The key has asked too often; `retry_after_s` says when it may again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Access:
    """The keys of a file and of the environment, followed while they change. Safe between threads.

    Rates are counted in this process: with several ingress replicas each lets as much through.
    """

    def __init__(self, file: Path | None = None, environment: str | None = None) -> None:
        """Read the keys; raises `KeysError`.

        environment  the content of a key file; the variable WAN_TPU_API_KEYS when left out
        """
        content = os.environ.get(ENVIRONMENT) if environment is None else environment
        self._fixed = parse_keys(content, ENVIRONMENT) if content else {}
        self._file = file
        self._lock = threading.Lock()
        self._looked_at = -_LOOK_EVERY_S
        self._written: tuple[int, int, int] | None = None
        self._keys = dict(self._fixed)
        self._buckets: dict[str, _Bucket] = {}
        self._refresh(time.monotonic())

    @property
    def keys(self) -> int:
        """How many keys are in force."""
        with self._lock:
            return len(self._keys)

    def admit(self, authorization: str | None) -> ApiKey:
        """Return the key of an Authorization header, and count the request; raises `UnknownKey`, `TooMany`."""
        scheme, _, presented = (authorization or "").partition(" ")
        now = time.monotonic()
        with self._lock:
            self._refresh(now)
            keys = self._keys
        key = matching(keys, presented.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            raise UnknownKey("no valid API key was given; send one as: Authorization: Bearer wan_...")
        if key.requests_per_minute is not None:
            with self._lock:
                per_s = key.requests_per_minute / 60
                wait_s = self._buckets.setdefault(key.id, _Bucket(per_s, now)).take(per_s, now)
            if wait_s > 0:
                raise TooMany(
                    f"this key may send {key.requests_per_minute:g} requests a minute; try again in {wait_s:.1f} s",
                    wait_s,
                )
        return key

    def _refresh(self, now: float) -> None:
        if self._file is None or now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        written = _stamp(self._file)
        if written == self._written and written is not None:
            return
        try:
            keys = {key.id: key for key in list_keys(self._file)}
        except KeysError:
            if self._written is None:
                raise
            return  # being edited by hand: the keys that were in force stay so
        self._keys, self._written = self._fixed | keys, written


class _Bucket:
    """Holds what a key may ask at once; refilled at its rate."""

    def __init__(self, per_s: float, now: float) -> None:
        self._tokens = self._capacity(per_s)
        self._filled_at = now

    def take(self, per_s: float, now: float) -> float:
        """Take one and return 0, or return how long to wait for it."""
        self._tokens = min(self._capacity(per_s), self._tokens + (now - self._filled_at) * per_s)
        self._filled_at = now
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / per_s

    @staticmethod
    def _capacity(per_s: float) -> float:
        return max(1.0, per_s * BURST_S)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
