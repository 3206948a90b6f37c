"""Tell a client's server that a video has ended: signed as OpenAI's webhooks are, tried again, once too often at worst.

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
from pathlib import Path

import h11

from actors.api.fetch import FetchError, FetchSettings, check_url, dial, request_line
from actors.api.logs import told
from actors.api.metrics import Meters
from actors.jobs.deliveries import Deliveries, Delivery
from actors.jobs.values import Job
from wan_tpu.errors import InvalidInput

log = logging.getLogger(__name__)

_PREFIX = "whsec_"
# Seconds until the next attempt; after the last one nobody tries any more. A day and a half in all.
_PAUSES_S = (5, 30, 120, 600, 1800, 7200, 21600, 43200, 43200)


class Webhooks:
    """Calls the webhooks that are due. Any number of processes may have one."""

    def __init__(self, deliveries: Deliveries, secret: bytes, fetching: FetchSettings, meters: Meters) -> None:
        self._deliveries, self._secret, self._fetching, self._meters = deliveries, secret, fetching, meters

    async def call_due(self) -> int:
        """Call all that are due, one after the other; return how many those were."""
        called = 0
        while (delivery := await asyncio.to_thread(self._deliveries.claim)) is not None:
            await self._call(delivery)
            called += 1
        return called

    async def _call(self, delivery: Delivery) -> None:
        try:
            status = await post(delivery.url, signed(delivery.job, self._secret), self._fetching)
            problem = None if 200 <= status < 300 else f"status {status}"
        except FetchError as error:
            problem = str(error)
        last = delivery.attempts > len(_PAUSES_S)
        outcome = "told" if problem is None else "given_up" if last else "failed"
        self._meters.webhooks.labels(outcome).inc()
        told(log, f"webhook {outcome}", job=delivery.job.id, attempt=delivery.attempts, reason=problem)
        if problem is None or last:
            await asyncio.to_thread(self._deliveries.done, delivery)
        else:
            await asyncio.to_thread(self._deliveries.again, delivery, float(_PAUSES_S[delivery.attempts - 1]))


def signed(job: Job, secret: bytes, now: float | None = None) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers that tell of a job's end. The id is the same in every attempt."""
    event, moment = f"evt_{job.id}", int(time.time() if now is None else now)
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


async def post(url: str, message: tuple[bytes, dict[str, str]], fetching: FetchSettings) -> int:
    """Send a message to a public https URL and return the status; redirects aren't followed. Raises `FetchError`."""
    parts = check_url(url, fetching)
    content, given = message
    try:
        async with asyncio.timeout(fetching.timeout_s), dial(parts, fetching) as ((reader, writer), host):
            target, named = request_line(host, parts, fetching)
            headers = {"Host": named, "User-Agent": "wan-tpu", "Content-Type": "application/json", **given}
            headers |= {"Content-Length": str(len(content)), "Connection": "close"}
            protocol = h11.Connection(h11.CLIENT)
            try:
                start = protocol.send(h11.Request(method="POST", target=target, headers=list(headers.items())))
            except h11.LocalProtocolError:
                raise FetchError("the webhook's URL has characters that must be percent-encoded") from None
            body = protocol.send(h11.Data(data=content))
            writer.write((start or b"") + (body or b"") + (protocol.send(h11.EndOfMessage()) or b""))
            await writer.drain()
            while True:
                event = protocol.next_event()
                if event is h11.NEED_DATA:
                    protocol.receive_data(await reader.read(65536))
                elif isinstance(event, h11.Response):
                    return event.status_code
                elif not isinstance(event, h11.InformationalResponse):
                    raise FetchError(f"{host} closed the connection without an answer")
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
        return base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except OSError as error:
        raise InvalidInput(f"can't read {file} ({error.strerror}), the secret that webhooks are signed with") from None
    except (binascii.Error, UnicodeDecodeError):
        raise InvalidInput(f"{file} holds no secret of the form whsec_BASE64; remove it, and one is made") from None
