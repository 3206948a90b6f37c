"""Authentication and rate limits: what each API key may do, and how often."""

import dataclasses
import math
import time
from collections.abc import Sequence

from actors.api.core.errors import HttpError
from actors.api.limits import ServiceLimits
from actors.api.token_buckets import TokenBuckets
from actors.jobs.database import Database
from actors.jobs.keys import OPERATE, PRIORITIES, list_keys, match_key
from actors.jobs.tables import ApiKey
from actors.jobs.values import Room

REFRESH_S = 0.5  # Pause between two reads of the keys, so that a revoked key stops working within a second.
BURST_S = 10.0  # A key may send as many requests at once as its rate allows within this time.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Caller:
    """The sender of a request, and what the sender may do."""

    owner: str  # Owner of the jobs that the caller creates: the key's id, or "" if there are no keys.
    sees: str | None  # The owner whose jobs the caller may see and cancel; None for everybody's.
    room: Room  # How many segments of the caller's jobs may wait, and how much they may store.
    priority: int  # The highest priority that the caller's jobs may have.
    rate: dict[str, str]  # Headers that report its rate limit.


def read_bearer(authorization: str | None) -> str | None:
    """Return the bearer token of an Authorization header, or None if it has none."""
    scheme, _, credentials = (authorization or "").partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else None


class Access:
    """The keys, as of the latest `refresh`. Safe between threads.

    Rates are counted per process, so each of several ingress replicas admits the full rate.
    """

    def __init__(self, database: Database, queue_limit: int, limits: ServiceLimits) -> None:
        """Read the keys; raises `StoreUnavailable`."""
        self._database, self._queue_limit, self._limits = database, queue_limit, limits
        self._rates = TokenBuckets(BURST_S)  # Of each key's requests, and of its segments.
        self.refresh()

    def refresh(self) -> None:
        """Read the keys again. If this raises `StoreUnavailable`, the known keys stay in force."""
        self._keys = {key.id: key for key in list_keys(self._database)}

    @property
    def required(self) -> bool:
        """Whether requests need a key: once a key has been made, even if all are revoked."""
        return bool(self._keys)

    def admit(self, secret: str | None, any_of: Sequence[str]) -> Caller:
        """Return the caller that presents a key, and count the request.

        Args:
            any_of: Scopes of which the key must have one.

        Raises:
            HttpError: 401, 403 or 429.
        """
        if not self.required:
            room = Room(queue=self._queue_limit)
            return Caller(owner="", sees="", room=room, priority=PRIORITIES[1], rate={})
        key = match_key(self._keys, secret or "")
        if key is None or not self.is_in_force(key.id):
            message = "no valid API key was given; send one as: Authorization: Bearer wan_..."
            if key is not None:
                message = "this API key has expired; ask the operator of this service for another"
            raise HttpError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        scopes = key.scopes.split(",")
        if not set(any_of) & set(scopes):
            message = f"this key may only {' and '.join(scopes)}; use a key that may {' or '.join(any_of)}"
            raise HttpError(403, message, code="missing_scope")
        share = max(1, math.ceil(self._limits.key_share * self._queue_limit))
        waiting = share if key.waiting is None else key.waiting
        return Caller(
            owner=key.id,
            sees=None if OPERATE in scopes else key.id,
            room=Room(queue=self._queue_limit, owner=waiting, stored=self._limits.key_bytes),
            priority=key.priority,
            rate=self._count_request(key),
        )

    def charge_segments(self, owner: str, segments: int) -> None:
        """Count the segments of a request, which a key may ask for at the rate of its requests.

        What exceeds the rate delays the key's next videos, so that no number of segments is too large for a rate.

        Raises:
            HttpError: 429, if earlier segments have exceeded the rate.
        """
        key = self._keys.get(owner)
        if key is None:
            return
        rate = self._get_rate(key)
        wait_s, _ = self._rates.take(f"segments of {key.id}", 60 / rate, segments)
        if wait_s > 0:
            after_s = max(1, math.ceil(wait_s))
            message = f"this key may ask for {rate:g} videos or segments a minute; try again in {after_s} s"
            raise HttpError(429, message, code="rate_limit_exceeded", after_s=after_s)

    def refund_segments(self, owner: str, segments: int) -> None:
        """Take back what `charge_segments` has counted for a request that was refused after all."""
        key = self._keys.get(owner)
        if key is not None:
            self._rates.give_back(f"segments of {key.id}", segments * 60 / self._get_rate(key))

    def is_in_force(self, owner: str) -> bool:
        """Return whether a key is still valid. Streams check this repeatedly."""
        if not owner:
            return not self.required
        key = self._keys.get(owner)
        has_expired = key is None or (key.expires_at is not None and key.expires_at <= time.time())
        return key is not None and key.revoked_at is None and not has_expired

    def get_name(self, owner: str) -> str:
        """Return the name of a key, or "" if it doesn't exist."""
        key = self._keys.get(owner)
        return "" if key is None else key.name

    def _count_request(self, key: ApiKey) -> dict[str, str]:
        """Count a request and return headers that report what is left of the rate; raises `HttpError`."""
        rate = self._get_rate(key)
        every_s = 60 / rate
        burst = max(1, math.floor(BURST_S / every_s))
        wait_s, spent_s = self._rates.take(key.id, every_s)
        remaining = 0 if wait_s > 0 else max(0, burst - math.ceil(spent_s / every_s))
        headers = {
            "x-ratelimit-limit-requests": f"{rate:g}",
            "x-ratelimit-remaining-requests": str(remaining),
            # Rounded up like Retry-After, so that a client that returns at that moment isn't rejected again.
            "x-ratelimit-reset-requests": f"{math.ceil(max(wait_s, spent_s) * 1000) / 1000:.3f}s",
        }
        if wait_s > 0:
            after_s = max(1, math.ceil(wait_s))
            message = f"this key may send {rate:g} requests a minute; try again in {after_s} s"
            raise HttpError(429, message, code="rate_limit_exceeded", after_s=after_s, headers=headers)
        return headers

    def _get_rate(self, key: ApiKey) -> float:
        """Return how many requests a minute a key may send, on average."""
        return self._limits.requests_per_minute if key.requests_per_minute is None else key.requests_per_minute
