"""What an ingress process holds: the database, the storage, the keys; and how a request becomes a job."""

import asyncio
import contextlib
import functools
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from prometheus_client import generate_latest
from starlette.requests import Request

from actors.api.estimates import Estimator
from actors.api.http.access import REFRESH_S, Access, Caller
from actors.api.http.bodies import Asked, asked_for, image_of
from actors.api.http.error_answers import HttpError
from actors.api.http.following import Following, Seen
from actors.api.http.objects import PICTURES, KeyUsage
from actors.api.intake.apart import IMAGE, IMAGES, LAST
from actors.api.intake.create_video import adapters_of, generation_request
from actors.api.intake.reader import Reader
from actors.api.intake.receiving import Bodies
from actors.api.metrics import FRESH_S, HEARTBEAT_S, Meters, ServiceMetrics
from actors.api.outbound.client import FetchError, check_url
from actors.api.settings import ServiceSettings
from actors.api.sizes import check_size
from actors.jobs import deliveries
from actors.jobs.errors import QueueFull, StoreUnavailable
from actors.jobs.heartbeats import process_name, read_heartbeats, send_heartbeat
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore, open_database
from actors.jobs.tables import Heartbeat, Job
from actors.jobs.usage import read_usage
from actors.jobs.values import Room
from actors.observe.logs import log_event, repeated
from actors.storage.base import Missing, StorageError
from actors.storage.opening import open_storage
from wan_tpu.errors import InvalidRequest
from wan_tpu.spec import ModelSpec

log = logging.getLogger(__name__)

_RETRIES = "x-stainless-retry-count"  # in which OpenAI's client says that it repeats a request
_SILENT_S = 4 * HEARTBEAT_S  # without a heartbeat that could be recorded, after which nothing is accepted here


class Service:
    """Opened once in every ingress process. Methods that end in `_now` wait for the database: call them in threads."""

    def __init__(self, settings: ServiceSettings, spec: ModelSpec) -> None:
        """Open everything; raises `InvalidInput` where something can't be used."""
        self.settings, self.spec = settings, spec
        self.database = open_database(settings.database)
        self.store = JobStore(self.database, settings.jobs)
        self.storage = open_storage(settings.storage)
        self.retention = Retention(self.database, self.storage, settings.jobs)
        self.access = Access(self.database, settings.queue_limit, settings.limits)
        self.following = Following(self.look_at_all_now, self.access, settings.limits.followers)
        self.bodies, self.reader = Bodies(settings.limits), Reader(settings.limits)
        self.forecast = Estimator(self.store, settings.concurrency)
        self.meters = Meters()
        self._name, self._recorded = process_name("ingress"), time.monotonic()

    async def submit(self, request: Request, caller: Caller, idempotency_key: str | None) -> Seen:
        """Accept a job, or refuse it with a reason; return it, and in how many seconds it will be done.

        What costs more comes later: the queue is looked at before the body, all fields before the image.
        """
        self.bodies.check(request.headers, caller.owner)
        await asyncio.to_thread(self._refuse_early_now, caller, idempotency_key)
        async with self._asked(request, caller) as asked:
            retried = request.headers.get(_RETRIES, "0") != "0"
            known = functools.partial(self.store.known, retried=retried)
            job = await asyncio.to_thread(known, caller.owner, idempotency_key, asked.digest)
            new = False
            if job is None:
                job, new = await self._submit(asked, caller, idempotency_key)
        return await self._accepted(job, new)

    async def remix(self, job: str, request: Request, caller: Caller, idempotency_key: str | None) -> Seen:
        """Accept a job with the request of another one, but for its prompt; raises `JobNotFound`."""
        await asyncio.to_thread(self._refuse_early_now, caller, idempotency_key)
        source = await asyncio.to_thread(self.store.get, job, caller.sees)
        async with self._asked(request, caller) as asked:
            more = asked.fields.model_fields_set - {"prompt"} | {name for name in IMAGES if asked.has(name)}
            if more:
                field = min(more)
                raise InvalidRequest(f"{field} can't be changed by a remix, the prompt alone can", field)
        made, new = await asyncio.to_thread(self._remix_now, source, asked.fields.prompt, caller, idempotency_key)
        return await self._accepted(made, new)

    @contextlib.asynccontextmanager
    async def _asked(self, request: Request, caller: Caller) -> AsyncIterator[Asked]:
        kind, owner = request.headers.get("content-type", ""), caller.owner
        async with self.bodies.received(request, owner) as body, asked_for(kind, body, self.reader, owner) as asked:
            yield asked

    async def _accepted(self, job: Job, new: bool) -> Seen:
        size = "{width}x{height}x{frames}".format(**job.request)
        steps, owner = job.request["steps"], job.owner or None
        log_event(log, "accepted" if new else "known", job=job.id, owner=owner, size=size, steps=steps)
        return await asyncio.to_thread(self.look_now, job.id, job.owner)

    async def _submit(self, asked: Asked, caller: Caller, idempotency_key: str | None) -> tuple[Job, bool]:
        fields, settings, owner = asked.fields, self.settings, caller.owner
        self._check_model(fields.model)
        if fields.priority > caller.priority:
            message = f"priority is {fields.priority}; this key may ask for at most {caller.priority}"
            raise HttpError(403, message, code="priority_not_allowed", param="priority")
        self._check_webhook(fields.webhook_url)
        request = generation_request(fields, self.spec, settings.catalogue, seed=secrets.randbelow(2**31))
        loras = adapters_of(fields, self.spec, settings.catalogue)  # kept by name: where they lie may change
        image, last, step = asked.has(IMAGE), asked.has(LAST), self.spec.frame_step
        resolved = self.spec.plan(request, image=image, last=last).request
        follows = image and request.height is None and self.spec.follows_image
        if not follows:
            check_size(resolved, settings.largest, step)
        pictures: dict[str, bytes] = {}
        given: dict[str, str] = {}
        for name in IMAGES:
            async with image_of(asked, name, self.reader, settings.fetch, owner) as found:
                if found is None:
                    continue
                reading, there = found
                if follows and name == IMAGE:  # only now is there a size
                    resolved = self.spec.plan(request, image=True, last=last, picture=reading.sizes[there]).request
                    check_size(resolved, settings.largest, step)
                size, crop = (resolved.height, resolved.width), self.spec.crops_image
                pictures[name] = await reading.picture(*size, crop=crop, name=there)
                given[PICTURES[name]] = "{1}x{0}".format(*reading.sizes[there])
        job = Job(
            owner=owner,
            request=resolved.to_json()
            | {"model": settings.model, "seconds": fields.seconds, "loras": loras}
            | {"skipped": self.spec.skipped_steps(resolved)}
            | given,
            input_image=_image_name() if IMAGE in pictures else None,
            input_last_image=_image_name() if LAST in pictures else None,
            priority=fields.priority,
            deadline=fields.deadline,
            idempotency_key=idempotency_key,
            body_digest=asked.digest,
        )
        pngs = list(pictures.values())
        return await asyncio.to_thread(self._accept_now, job, fields.webhook_url, pngs, caller.room)

    def look_now(self, job: str, owner: str | None) -> Seen:
        """Return a job and in how many seconds it will be done, if that is known; raises `JobNotFound`."""
        found = self.store.look(job, owner)
        return found, self.forecast.eta_s(found)

    def look_at_all_now(self, jobs: Iterable[str]) -> dict[str, Seen]:
        """Return those of some jobs that there are."""
        return {job.id: (job, self.forecast.eta_s(job)) for job in self.store.look_at_all(jobs)}

    def usage_now(self, caller: Caller, first: str, last: str) -> list[KeyUsage]:
        """Return the usage of the keys that a caller sees and that have any."""
        return [
            KeyUsage(
                key=key,
                name=self.access.name(key),
                videos=used.videos,
                failed=used.failed,
                chip_seconds=round(used.chip_seconds, 3),
                dollars=round(used.dollars, 6),
            )
            for key, used in read_usage(self.database, caller.sees, first=first, last=last).items()
        ]

    def metrics_now(self) -> bytes:
        """Return the figures of all processes, as Prometheus reads them."""
        mine = self._heartbeat()
        try:
            others = [other for other in read_heartbeats(self.database, FRESH_S) if other.name != mine.name]
            counts, waiting, usage = self.store.counts(), deliveries.waiting(self.database), read_usage(self.database)
        except StoreUnavailable as error:  # this process has figures still
            log_event(log, "database", logging.WARNING, reason=str(error))
            return generate_latest(self.meters.registry)
        return generate_latest(ServiceMetrics([*others, mine], counts, waiting, usage))

    def ready_now(self) -> int:
        """Return how many workers there are; raises when database or storage can't be read, or not be written."""
        with contextlib.suppress(Missing):  # it answers
            self.storage.size("ready")
        self._check_disk()
        if time.monotonic() - self._recorded > _SILENT_S:
            raise StoreUnavailable(f"nothing could be written to {self.database} for {_SILENT_S:g} s")
        return [process.kind for process in read_heartbeats(self.database, FRESH_S)].count("worker")

    async def stay_current(self) -> None:
        """Send heartbeats with this process's figures, and follow which keys there are, until this is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for work, every_s in ((self._send_heartbeat, HEARTBEAT_S), (self.access.refresh, REFRESH_S)):
                in_thread = functools.partial(asyncio.to_thread, work)
                tasks.create_task(repeated(log, "heartbeats and keys", in_thread, every_s))

    def _refuse_early_now(self, caller: Caller, idempotency_key: str | None) -> None:
        self._check_disk()
        with self._queue_full():
            self.store.check_room(caller.owner, idempotency_key, caller.room)

    def _accept_now(self, job: Job, webhook_url: str | None, pngs: Sequence[bytes], room: Room) -> tuple[Job, bool]:
        names, new = job.inputs, False
        for name in names:
            self.retention.reserve(name)
        try:
            for name, png in zip(names, pngs, strict=True):
                self.storage.write(name, png)
            with self._queue_full():
                job, new = self.store.submit(job, webhook_url=webhook_url, room=room)
        finally:
            for name in () if new else names:
                with contextlib.suppress(StoreUnavailable):  # it is removed in an hour
                    self.retention.discard(name)
        return job, new

    def _remix_now(self, source: Job, prompt: str, caller: Caller, idempotency_key: str | None) -> tuple[Job, bool]:
        digest = hashlib.sha256(f"{source.id}\0{prompt}".encode()).hexdigest()
        known = self.store.known(caller.owner, idempotency_key, digest)
        if known is not None:
            return known, False
        pngs = [self.storage.read(name) for name in source.inputs]
        made = Job(
            owner=caller.owner,
            request=source.request | {"prompt": prompt},
            input_image=None if source.input_image is None else _image_name(),
            input_last_image=None if source.input_last_image is None else _image_name(),
            priority=min(source.priority, caller.priority),
            idempotency_key=idempotency_key,
            body_digest=digest,
            remixed_from=source.id,
        )
        return self._accept_now(made, None, pngs, caller.room)

    @contextlib.contextmanager
    def _queue_full(self) -> Iterator[None]:
        try:
            yield
        except QueueFull as full:
            raise HttpError(429, str(full), code="queue_full", after_s=self.forecast.next_free_s()) from None

    def _check_model(self, model: str | None) -> None:
        if model is not None and model not in (self.settings.model, *self.settings.aliases):
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

    def _check_disk(self) -> None:
        free, kept = self.storage.free(), self.settings.limits.free_bytes
        if free is not None and free < kept:
            raise StorageError(f"{self.storage.location()} has {free} bytes left, {kept} are kept free; make room")

    def _send_heartbeat(self) -> None:
        send_heartbeat(self.database, self._heartbeat())
        self._recorded = time.monotonic()

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(name=self._name, kind="ingress", metrics=self.meters.text())


def _image_name() -> str:
    return f"input-{secrets.token_hex(16)}.png"
