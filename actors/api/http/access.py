"""Who may ask, and how often: the keys of the database, and a rate for each."""

import math
import threading
import time

from actors.api.http.error_answers import HttpError
from actors.jobs.database import Database
from actors.jobs.keys import list_keys, match_key
from actors.jobs.tables import ApiKey

REFRESH_S = 0.5  # between two reads of the keys: a revoked one opens nothing a second later
BURST_S = 10.0  # a key may ask as often as in so many seconds at once


class Access:
    """The keys, as they were at the latest `refresh`. Safe between threads.

    Rates are counted in this process: with several ingress replicas each lets as much through.
    """

    def __init__(self, database: Database) -> None:
        """Read the keys; raises `StoreUnavailable`."""
        self._database, self._lock = database, threading.Lock()
        self._spent: dict[str, float] = {}  # key -> until when its rate is used up, of time.monotonic()
        self.refresh()

    def refresh(self) -> None:
        """Read the keys again; raises `StoreUnavailable`, and then those that were known stay in force."""
        self._keys = {key.id: key for key in list_keys(self._database)}

    @property
    def required(self) -> bool:
        """Whether a request needs a key: once one was ever made, also when all are revoked."""
        return bool(self._keys)

    def admit(self, authorization: str | None) -> ApiKey:
        """Return the key of an Authorization header, and count the request; raises `HttpError` 401 or 429."""
        scheme, _, presented = (authorization or "").partition(" ")
        key = match_key(self._keys, presented.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            message = "no valid API key was given; send one as: Authorization: Bearer wan_..."
            raise HttpError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if key.requests_per_minute is not None:
            wait_s = self._take(key.id, 60 / key.requests_per_minute)
            if wait_s > 0:
                allowed = f"this key may send {key.requests_per_minute:g} requests a minute"
                message, after = f"{allowed}; try again in {wait_s:.1f} s", str(max(1, round(wait_s)))
                raise HttpError(429, message, code="rate_limit_exceeded", headers={"Retry-After": after})
        return key

    def _take(self, key: str, every_s: float) -> float:
        """Count a request and return 0, or return how long to wait for it (GCRA: a token bucket in one number)."""
        with self._lock:
            now = time.monotonic()
            spent = max(self._spent.get(key, -math.inf), now - max(BURST_S, every_s))
            if spent > now - every_s:
                return spent + every_s - now
            self._spent[key] = spent + every_s
            return 0.0
