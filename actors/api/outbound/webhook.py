"""Webhooks: call a client's server when a video has ended, signed as OpenAI's are, at least once.

The signature is that of https://www.standardwebhooks.com: OpenAI's client checks it with `webhooks.unwrap`.
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
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from actors.api.limits import Limits
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
_LOOK_S = 1.0  # for more that are due, while some are called
_LEAST_BYTES = 16  # of a secret
# Seconds until the next attempt; after the last one nobody tries any more. A day and a half in all.
_PAUSES_S = (5, 30, 120, 600, 1800, 7200, 21600, 43200, 43200)


class Webhooks:
    """Calls the webhooks that are due. Any number of processes may have one."""

    def __init__(
        self, database: Database, secret: bytes, fetching: FetchSettings, meters: Meters, limits: Limits
    ) -> None:
        self._database, self._secret, self._fetching, self._meters = database, secret, fetching, meters
        self._limits = limits

    async def call_due(self) -> int:
        """Call all that are due, some of each owner at a time; return how many those were.

        Calls settle their own exceptions, and one that can't be claimed leaves those under way alone: no client's
        server, and no failure of the database, ends the calls of others.
        """
        count, owners = 0, dict[asyncio.Task[None], str]()
        async with asyncio.TaskGroup() as group:
            while True:
                due = await self._claim(owners) if len(owners) < self._limits.webhooks else None
                if due is not None:
                    owners[group.create_task(self._call(due))] = due.job.owner
                    count += 1
                elif owners:  # Those that never answer hold up no others, which come meanwhile.
                    done, _ = await asyncio.wait(owners, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        del owners[task]
                else:
                    return count

    async def _claim(self, calls: Mapping[asyncio.Task[None], str]) -> Delivery | None:
        """Take a delivery of an owner that has room; None where none is due, or none can be claimed now."""
        busy = [
            owner for owner, calling in Counter(calls.values()).items() if calling >= self._limits.webhooks_of_a_key
        ]
        try:
            return await asyncio.to_thread(deliveries.claim, self._database, busy)
        except Exception as error:
            if not calls:
                raise
            reason = str(error) if isinstance(error, StoreUnavailable) else None
            log_event(log, "webhooks not claimed", logging.WARNING, reason=reason or type(error).__name__)
            return None

    async def _call(self, delivery: Delivery) -> None:
        """Call a webhook and record how that went; whatever is raised is settled here."""
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
        """Send what a job has become; return what is wrong with how that was answered, None where nothing is."""
        job = delivery.job
        try:
            status = await post(delivery.url, signed(job, self._secret), self._fetching, owner=job.owner)
        except FetchError as error:
            return str(error)
        except Exception as error:
            _log_unforeseen("webhook failed", delivery, error)
            return type(error).__name__
        return None if 200 <= status < 300 else f"status {status}"


def _log_unforeseen(event: str, delivery: Delivery, error: Exception) -> None:
    log.error(event, exc_info=error, extra={"fields": {"job": delivery.job.id, "attempt": delivery.attempts}})


def signed(job: Job, secret: bytes) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers of a job's end. The id is the same in every attempt."""
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
    """Send a message to a public https URL and return the status; redirects aren't followed.

    Args:
        url: an https URL
        message: content, and the headers that sign it
        fetching: which URLs may be asked, and for how long
        owner: of the job; names are looked up in turn by owner

    Raises:
        FetchError: whatever goes wrong with the URL or the server behind it
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
    """Return the secret of a file, "whsec_" and base64; raises `InvalidInput`.

    make  write one where there is none
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
        raise InvalidInput(f"{file} holds no secret of the form whsec_BASE64; remove it, and one is made") from None
    if len(secret) < _LEAST_BYTES:  # a crash may have left it empty, and an empty key signs, too
        raise InvalidInput(
            f"{file} holds a secret of {len(secret)} bytes, at least {_LEAST_BYTES} are needed; remove it"
        )
    return secret
