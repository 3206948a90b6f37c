"""What an ingress process holds: the database, the storage, the keys; and how a request becomes a job."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Any

from prometheus_client import generate_latest

from actors.api.estimates import Estimator
from actors.api.http.access import REFRESH_S, Access
from actors.api.http.bodies import Asked, read_image
from actors.api.http.error_answers import HttpError
from actors.api.http.objects import generation_request
from actors.api.images.decoder import CleanImage, ImageDecoder
from actors.api.metrics import FRESH_S, HEARTBEAT_S, Meters, ServiceMetrics
from actors.api.outbound.client import FetchError, check_url
from actors.api.settings import ServiceSettings
from actors.api.sizes import admit
from actors.jobs.deliveries import Deliveries
from actors.jobs.errors import QueueFull
from actors.jobs.heartbeats import Heartbeats, process_name
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore, open_database
from actors.jobs.tables import Heartbeat, Job
from actors.observe.logs import log_event
from actors.storage.base import Missing
from actors.storage.opening import open_storage
from wan_tpu.errors import InvalidRequest, WanTpuError
from wan_tpu.spec import ModelSpec

log = logging.getLogger(__name__)


class Service:
    """Opened once in every ingress process. Methods that end in `_now` wait for the database: call them in threads."""

    def __init__(self, settings: ServiceSettings, spec: ModelSpec) -> None:
        """Open everything; raises `InvalidInput` where something can't be used."""
        self.settings, self.spec = settings, spec
        self.database = open_database(settings.database)
        self.store = JobStore(self.database, settings.jobs)
        self.storage = open_storage(settings.storage)
        self.retention = Retention(self.database, self.storage, settings.jobs)
        self.access = Access(self.database)
        self.images = ImageDecoder(settings.images)
        self.forecast = Estimator(self.store, settings.concurrency)
        self.meters = Meters()
        self._heartbeats = Heartbeats(self.database)
        self._deliveries = Deliveries(self.database)
        self._name = process_name("ingress")

    async def submit(self, asked: Asked, owner: str, idempotency_key: str | None) -> tuple[Job, float | None]:
        """Accept a job, or refuse it with a reason; return it, and in how many seconds it will be done."""
        fields = asked.fields
        self._check_model(fields.model)
        self._check_webhook(fields.webhook_url)
        seed = secrets.randbelow(2**31)
        request = generation_request(fields, self.spec, seed=seed)
        largest, follows = self.settings.largest, request.height is None and self.spec.follows_image
        resolved = admit(request, self.spec, () if follows else largest, image=asked.has_image)
        image = await read_image(asked, self.images, self.settings.fetch)
        if follows and image is not None:  # only now is there a size
            resolved = admit(request, self.spec, largest, image=True, picture=(image.height, image.width))
        name = None if image is None else f"input-{secrets.token_hex(16)}.png"
        image_size = None if image is None else f"{image.width}x{image.height}"
        body: dict[str, Any] = resolved.to_json() | {"model": self.settings.model, "image": image_size}
        job = Job(
            owner=owner,
            request=body,
            input_image=name,
            priority=fields.priority,
            deadline=fields.deadline,
            idempotency_key=idempotency_key,
            body_digest=asked.digest,
        )
        job, eta_s, new = await asyncio.to_thread(self._accept_now, job, fields.webhook_url, image)
        size = "{width}x{height}x{frames}".format(**job.request)
        log_event(log, "accepted" if new else "known", job=job.id, owner=owner or None, size=size, steps=body["steps"])
        return job, eta_s

    def look_now(self, job: str, owner: str | None) -> tuple[Job, float | None]:
        """Return a job and in how many seconds it will be done, if that is known; raises `JobNotFound`."""
        found = self.store.look(job, owner)
        return found, self.forecast.eta_s(found)

    def metrics_now(self) -> bytes:
        """Return the figures of all processes, as Prometheus reads them."""
        mine = self._heartbeat()
        others = [other for other in self._heartbeats.read(FRESH_S) if other.name != mine.name]
        return generate_latest(ServiceMetrics([*others, mine], self.store.counts(), self._deliveries.waiting()))

    def workers_now(self) -> int:
        """Return how many workers there are; raises when the database or storage can't be used."""
        with contextlib.suppress(Missing):  # it answers
            self.storage.size("ready")
        return [process.kind for process in self._heartbeats.read(FRESH_S)].count("worker")

    async def stay_current(self) -> None:
        """Send heartbeats with this process's figures, and follow which keys there are, until this is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_repeat(lambda: self._heartbeats.send(self._heartbeat()), HEARTBEAT_S))
            tasks.create_task(_repeat(self.access.refresh, REFRESH_S))

    def _accept_now(
        self, job: Job, webhook_url: str | None, image: CleanImage | None
    ) -> tuple[Job, float | None, bool]:
        if image is not None and job.input_image is not None:
            self.retention.reserve(job.input_image)
            self.storage.write(job.input_image, image.png)
        try:
            job, new = self.store.submit(job, webhook_url=webhook_url, queue_limit=self.settings.queue_limit)
        except QueueFull as full:
            after = {"Retry-After": str(self.forecast.next_free_s())}
            raise HttpError(429, str(full), code="queue_full", headers=after) from None
        return *self.look_now(job.id, job.owner), new

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self.settings.model):
            message = f"there is no model {model[:80]!r} here; there is {self.settings.model!r}"
            raise HttpError(400, message, code="model_not_found", param="model")

    def _check_webhook(self, url: str | None) -> None:
        if url is None:
            return
        if self.settings.webhook_secret_file is None:
            raise InvalidRequest("this service calls no webhooks; leave webhook_url out", "webhook_url")
        try:
            check_url(url, self.settings.webhooks)
        except FetchError as error:
            raise InvalidRequest(str(error), "webhook_url") from None

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(name=self._name, kind="ingress", metrics=self.meters.text())


async def _repeat(work: Callable[[], object], every_s: float) -> None:
    while True:
        try:
            await asyncio.to_thread(work)
        except WanTpuError as error:  # the database comes back
            log_event(log, "database", logging.WARNING, reason=str(error))
        except Exception:  # keys must be followed on
            log.exception("heartbeats and keys")
        await asyncio.sleep(every_s)
