"""Call clients' webhooks when videos have ended, at least once each, signed like OpenAI's.

The signature follows https://www.standardwebhooks.com. OpenAI's client checks it with `webhooks.unwrap`.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import logging
import secrets
import time
from pathlib import Path

from actors.api.fair_semaphore import FairSemaphore
from actors.api.limits import ServiceLimits
from actors.api.metrics import Meters
from actors.api.outbound.client import FetchError, FetchSettings, request
from actors.jobs import deliveries
from actors.jobs.database import Database
from actors.jobs.errors import StoreUnavailable
from actors.jobs.tables import Delivery, Job
from actors.observe.logs import log_event
from wan_tpu.errors import InvalidInput

log = logging.getLogger(__name__)

_JSON = {"Content-Type": "application/json"}
_PREFIX = "whsec_"
_LOOK_S = 1.0  # Between two looks for deliveries that are due, while others are under way.
_MIN_SECRET_BYTES = 16
# Seconds until the next attempt. After the last one a delivery is given up, a day and a half after the first attempt.
_PAUSES_S = (5, 30, 120, 600, 1800, 7200, 21600, 43200, 43200)


class Webhooks:
    """Calls the webhooks that are due. Any number of processes may have one."""

    def __init__(
        self, database: Database, secret: bytes, fetching: FetchSettings, meters: Meters, limits: ServiceLimits
    ) -> None:
        self._database, self._secret, self._fetching, self._meters = database, secret, fetching, meters
        self._limits, self._turns = limits, FairSemaphore(limits.webhooks, limits.webhooks_of_a_key)

    async def call_due(self) -> int:
        """Call all webhooks that are due, a few of each owner at a time, and return their number.

        Calls handle their own exceptions, and a failed claim doesn't affect calls under way. So neither a client's
        server nor a failure of the database ends other calls.
        """
        count, calls = 0, set[asyncio.Task[None]]()
        async with asyncio.TaskGroup() as group:
            while True:
                due = await self._claim(bool(calls)) if len(calls) < self._limits.webhooks else None
                if due is not None:
                    calls.add(group.create_task(self._call(due)))
                    await asyncio.sleep(0)  # The call takes its place.
                    count += 1
                elif calls:  # Look for more meanwhile, so that servers that never answer delay no others.
                    _, calls = await asyncio.wait(calls, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                else:
                    return count

    async def _claim(self, is_calling: bool) -> Delivery | None:
        """Claim a delivery of an owner below its limit; None if none is due, or if the claim fails during calls."""
        busy = self._turns.list_full()
        try:
            return await asyncio.to_thread(deliveries.claim, self._database, busy)
        except Exception as error:
            if not is_calling:
                raise
            reason = str(error) if isinstance(error, StoreUnavailable) else None
            log_event(log, "webhooks not claimed", logging.WARNING, reason=reason or type(error).__name__)
            return None

    async def _call(self, delivery: Delivery) -> None:
        """Call a webhook and record the outcome. This handles all exceptions."""
        async with self._turns.take_turn(delivery.job.owner):
            problem = await self._post(delivery)
        last = delivery.attempts > len(_PAUSES_S)
        outcome = "delivered" if problem is None else "given_up" if last else "failed"
        self._meters.webhooks.labels(outcome).inc()
        log_event(log, f"webhook {outcome}", job=delivery.job.id, attempt=delivery.attempts, reason=problem)
        try:
            if problem is None or last:
                await asyncio.to_thread(deliveries.remove, self._database, delivery)
            else:
                pause_s = float(_PAUSES_S[delivery.attempts - 1])
                await asyncio.to_thread(deliveries.postpone, self._database, delivery, pause_s)
        except StoreUnavailable as error:  # It is called again in two minutes.
            log_event(log, "webhook not noted", logging.WARNING, job=delivery.job.id, reason=str(error))
        except Exception as error:
            _log_unforeseen("webhook not noted", delivery, error)

    async def _post(self, delivery: Delivery) -> str | None:
        """Send a job's end to its webhook; return what went wrong, or None."""
        job = delivery.job
        try:
            status = await post(delivery.url, sign(job, self._secret), self._fetching, owner=job.owner)
        except FetchError as error:
            return str(error)
        except Exception as error:
            _log_unforeseen("webhook failed", delivery, error)
            return type(error).__name__
        return None if 200 <= status < 300 else f"status {status}"


def _log_unforeseen(event: str, delivery: Delivery, error: Exception) -> None:
    log.error(event, exc_info=error, extra={"fields": {"job": delivery.job.id, "attempt": delivery.attempts}})


def sign(job: Job, secret: bytes) -> tuple[bytes, dict[str, str]]:
    """Return the body and signed headers that report a job's end. Their id is the same in every attempt."""
    event, moment = f"evt_{job.id}", int(time.time())
    body = {
        "id": event,
        "object": "event",
        "type": f"video.{job.status}",
        "created_at": int(job.ended_at or moment),
        "data": {"id": job.id},
    }
    content = json.dumps(body).encode()
    mac = hmac.new(secret, f"{event}.{moment}.".encode() + content, hashlib.sha256).digest()
    headers = {
        "webhook-id": event,
        "webhook-timestamp": str(moment),
        "webhook-signature": "v1," + base64.b64encode(mac).decode(),
    }
    return content, headers


async def post(url: str, message: tuple[bytes, dict[str, str]], fetching: FetchSettings, *, owner: str = "") -> int:
    """Send a message to a public https URL and return the status. Redirects aren't followed.

    Args:
        url: An https URL.
        message: The content, and the headers that sign it.
        fetching: Which URLs may be called, and for how long.
        owner: The job's owner. Owners get the resolver in turn.

    Raises:
        FetchError: Anything went wrong with the URL or the server behind it.
    """
    content, headers = message
    try:
        async with (
            asyncio.timeout(fetching.timeout_s),
            request("POST", url, fetching, _JSON | headers, content, owner=owner) as answer,
        ):
            return answer.status
    except TimeoutError:
        raise FetchError(f"the webhook did not answer within {fetching.timeout_s:g} s") from None


def read_secret(file: Path, *, make: bool = False) -> bytes:
    """Read the secret of a file that contains "whsec_" and base64.

    Args:
        make: Whether to create the file with a new secret if it doesn't exist.

    Raises:
        InvalidInput: The file can't be read or holds no such secret.
    """
    try:
        if make and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            file.write_text(_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode() + "\n")
        text = file.read_text().strip()
        secret = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except OSError as error:
        raise InvalidInput(f"can't read {file} ({error.strerror}), the secret that webhooks are signed with") from None
    except (binascii.Error, UnicodeDecodeError):
        raise InvalidInput(
            f"{file} holds no secret of the form whsec_BASE64; remove it, and a new one is created"
        ) from None
    if len(secret) < _MIN_SECRET_BYTES:  # A crash may have left the file empty, and even an empty key could sign.
        raise InvalidInput(
            f"{file} holds a secret of {len(secret)} bytes, but at least {_MIN_SECRET_BYTES} are needed; remove it, "
            "and a new one is created"
        )
    return secret
