"""What an ingress process holds: the database, the storage, the keys; and how a request becomes a job."""

import asyncio
import dataclasses
import json
import logging
import os
import secrets
import socket
from pathlib import Path
from typing import Any

from actors.api.access import Access
from actors.api.admission import KNOWN, Admission, Planner
from actors.api.bodies import Asked, read_image
from actors.api.failures import Busy, Problem
from actors.api.fetch import FetchSettings, check_url
from actors.api.forecast import Forecast, Outlook
from actors.api.forms import InvalidField
from actors.api.images import CleanImage, ImageDecoder
from actors.api.logs import told
from actors.api.metrics import FRESH_S, Meters, Whole
from actors.api.objects import Video, generation_request, video, with_model
from actors.api.settings import ServiceSettings
from actors.jobs.deliveries import Deliveries
from actors.jobs.errors import QueueFull
from actors.jobs.notices import Notices
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore, open_database
from actors.jobs.values import Job, Submission
from actors.storage import open_storage
from wan_tpu.errors import InvalidRequest, WanTpuError

log = logging.getLogger(__name__)

_TELL_S = 5.0  # between two notices


class Service:
    """Opened once in every ingress process. Methods that end in `_now` wait for the database: call them in threads."""

    def __init__(self, settings: ServiceSettings, planner: Planner) -> None:
        """Open everything; raises `InvalidInput` where something can't be used."""
        self.settings = settings
        self.database = open_database(settings.database)
        self.store = JobStore(self.database, settings.keeping)
        self.storage = open_storage(settings.storage)
        self.retention = Retention(self.database, self.storage, settings.keeping)
        self.access = Access(_path(settings.keys_file), settings.keys_text or "") if settings.with_keys else None
        self.images = ImageDecoder(settings.images)
        self.admission = Admission(planner, settings.room)
        self.forecast = Forecast(self.store, settings.concurrency)
        self.meters = Meters()
        self._notices = Notices(self.database)
        self._deliveries = Deliveries(self.database)
        self._name = process_name("ingress")

    async def submit(self, asked: Asked, owner: str, idempotency_key: str | None) -> tuple[Job, Outlook, bool]:
        """Accept a job, or refuse it with a reason; return it, what is known of its end, and whether it is new."""
        fields = asked.fields
        self._check_model(fields.model)
        self._check_webhook(fields.webhook_url)
        request = generation_request(
            fields, fps=fields.fps or await self.admission.fps(), seed=secrets.randbelow(2**31)
        )
        resolved = await self.admission.check(request, image=asked.has_image)
        image = await read_image(asked, self.images, self.settings.fetch)
        name = None if image is None else f"input-{secrets.token_hex(16)}.png"
        body: dict[str, Any] = with_model(resolved, self.settings.model)
        body["image"] = None if image is None else f"{image.width}x{image.height}"
        submission = Submission(
            owner=owner,
            request=body,
            input_image=name,
            priority=fields.priority,
            deadline=fields.deadline,
            idempotency_key=idempotency_key,
            body_digest=asked.digest,
            webhook_url=fields.webhook_url,
        )
        job, outlook, new = await asyncio.to_thread(self._accept_now, submission, image)
        told(log, "accepted" if new else "known", job=job.id, owner=owner or None, size=_size(job), steps=body["steps"])
        return job, outlook, new

    def outlook_now(self, job: Job) -> Outlook:
        """Return when a job will be done."""
        return self.forecast.outlook(job)

    def look_now(self, job: str, owner: str | None) -> tuple[Job, Outlook]:
        """Return a job and when it will be done; raises `JobNotFound`."""
        found, position = self.store.look(job, owner)
        return found, self.forecast.outlook_at(found, position)

    def video(self, job: Job, outlook: Outlook) -> Video:
        """Return a job as the API shows it."""
        return video(job, queue_position=outlook.queue_position, eta_s=outlook.eta_s)

    def metrics_now(self) -> bytes:
        """Return the figures of all processes."""
        self._notices.tell(self._name, "ingress", self.meters.text())
        notices = self._notices.read(within_s=FRESH_S)
        return Whole(notices, self.store.counts(), self._deliveries.waiting()).text()

    def state_now(self) -> dict[str, Any]:
        """Return how many processes there are and jobs wait; raises when the database or storage can't be used."""
        self.storage.exists("ready")
        kinds = [notice.kind for notice in self._notices.read(within_s=FRESH_S)]
        counts = self.store.counts().by_status
        return {"workers": kinds.count("worker"), "ingresses": kinds.count("ingress"), "jobs": counts}

    def tasks_now(self) -> list[str] | None:
        """Return what the model can make, of t2v and i2v; None as long as that isn't known."""
        known = self._notices.read(KNOWN)
        return json.loads(known[0].content)["tasks"] if known else None

    async def tell(self) -> None:
        """Tell this process's figures to the others, as long as it isn't cancelled."""
        while True:
            try:
                await asyncio.to_thread(self._notices.tell, self._name, "ingress", self.meters.text())
            except WanTpuError as error:
                told(log, "untold", logging.WARNING, reason=str(error))
            await asyncio.sleep(_TELL_S)

    def close(self) -> None:
        """Let go of the database."""
        self.database.close()

    def _accept_now(self, submission: Submission, image: CleanImage | None) -> tuple[Job, Outlook, bool]:
        if image is not None and submission.input_image is not None:
            self.retention.reserve(submission.input_image)
            self.storage.write(submission.input_image, image.png)
        try:
            job, new = self.store.submit(submission, queue_limit=self.settings.queue_limit)
        except QueueFull as full:
            raise Busy(str(full), self.forecast.next_free_s()) from None
        return job, self.forecast.outlook(job), new

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self.settings.model):
            message = f"there is no model {model[:80]!r} here; there is {self.settings.model!r}"
            raise Problem(400, message, code="model_not_found", param="model")

    def _check_webhook(self, url: str | None) -> None:
        if url is None:
            return
        if self.settings.webhook_secret_file is None:
            raise InvalidField("this service calls no webhooks; leave webhook_url out", "webhook_url")
        try:
            check_url(url, webhook_fetching(self.settings))
        except InvalidRequest as error:
            raise InvalidField(str(error), "webhook_url") from None


def webhook_fetching(settings: ServiceSettings) -> FetchSettings:
    """Return what may be called, of what may be fetched."""
    return dataclasses.replace(settings.fetch, what="webhook", max_bytes=65536, redirects=0)


def process_name(kind: str) -> str:
    """Return a name that no other process has."""
    return f"{kind}-{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(4)}"


def _path(file: str | None) -> Path | None:
    from pathlib import Path

    return None if file is None else Path(file).expanduser()


def _size(job: Job) -> str:
    return "{width}x{height}x{frames}".format(**job.request)
