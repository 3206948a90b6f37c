"""What an ingress process holds: the database, the storage, the keys; and how a request becomes a job."""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import generate_latest
from starlette.requests import Request

from actors.api.estimates import Estimator
from actors.api.http.access import REFRESH_S, Access, Caller
from actors.api.http.bodies import asked_for
from actors.api.http.error_answers import HttpError
from actors.api.http.following import EstimatedJob, Following
from actors.api.http.objects import KeyUsage
from actors.api.intake.acceptance import Acceptance, MaybeAccepted
from actors.api.intake.drafts import Drafts, image_name
from actors.api.intake.fair_semaphore import Work
from actors.api.intake.reader import Reader
from actors.api.intake.receiving import Bodies
from actors.api.intake.references import IMAGES
from actors.api.intake.retries import Retries
from actors.api.metrics import FRESH_S, HEARTBEAT_S, Meters, ServiceMetrics
from actors.api.settings import ServiceSettings
from actors.jobs import deliveries
from actors.jobs.errors import JobNotFound, QueueFull, StoreUnavailable
from actors.jobs.heartbeats import process_name, read_heartbeats, send_heartbeat
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore, open_database, make_private_key
from actors.jobs.tables import Heartbeat, Job
from actors.jobs.usage import read_usage
from actors.jobs.values import Room
from actors.observe.logs import log_event, repeat
from wan_tpu.errors import InvalidRequest, WanTpuError
from wan_tpu.spec import ModelSpec
from wan_tpu.storage.base import Missing, StorageError
from wan_tpu.storage.opening import open_storage

log = logging.getLogger(__name__)

_WORKERS = 2  # threads for what costs processor time, such as planning a request
_SILENT_S = 4 * HEARTBEAT_S  # without a heartbeat that could be recorded, after which nothing is accepted here


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accepted:
    """A job that was accepted, as it was seen then; `private`: its key, where this request alone waits for it."""

    seen: EstimatedJob
    private: str | None = None


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
        self.work, self.retries = Work(_WORKERS), Retries()
        self.drafts = Drafts(settings, spec, self.reader, self.work)
        self.acceptance = Acceptance(self.store, self.storage, self.retention)
        self.forecast = Estimator(self.store, settings.concurrency)
        self.meters = Meters()
        self._name, self._recorded = process_name("ingress"), time.monotonic()

    async def submit(
        self, request: Request, caller: Caller, idempotency_key: str | None, *, alone: bool = False
    ) -> Accepted:
        """Accept a job, or refuse it with a reason: after an error nothing was accepted, but for `MaybeAccepted`.

        What costs more comes later: the queue is looked at before the body, all fields before the image.

        Args:
            request: with the body, which is read here.
            caller: whose job it becomes.
            idempotency_key: under which the same request is the same job.
            alone: whether the job is to be cancelled once this request's client is gone: it gets a private key.
        """
        with self._repeating(request) as retried:
            self.bodies.check(request.headers, caller.owner)
            await asyncio.to_thread(self._refuse_early_now, caller, idempotency_key)
            with self.bodies.arriving(request.headers, caller.owner) as held:
                async with asked_for(request, held, self.reader, self.work) as asked:
                    known = functools.partial(self.store.find_repeat, retried=retried)
                    job = await asyncio.to_thread(known, caller.owner, idempotency_key, asked.digest)
                    draft = None if job is not None else await self.drafts.draft(asked, held, caller)
                # No place of the reader is held from here on, and none of its time-outs runs.
                new, private = False, make_private_key() if alone and idempotency_key is None else None
                if draft is not None:
                    draft.job.idempotency_key = private or idempotency_key
                    accept = functools.partial(self._accept_now, webhook_url=draft.webhook_url)
                    job, new = await asyncio.to_thread(accept, draft.job, draft.pngs, caller.room)
                assert job is not None
        return Accepted(seen=await self._look(job, new), private=private if new else None)

    async def remix(self, job: str, request: Request, caller: Caller, idempotency_key: str | None) -> Accepted:
        """Accept a job with the request of another one, but for its prompt; raises `JobNotFound`."""
        with self._repeating(request) as retried:
            await asyncio.to_thread(self._refuse_early_now, caller, idempotency_key)
            source = await asyncio.to_thread(self.store.get, job, caller.sees)
            self._check_source(source)
            with self.bodies.arriving(request.headers, caller.owner) as held:
                async with asked_for(request, held, self.reader, self.work) as asked:
                    more = asked.fields.model_fields_set - {"prompt"} | {name for name in IMAGES if asked.has(name)}
                    if more:
                        field = min(more)
                        raise InvalidRequest(f"{field} can't be changed by a remix, the prompt alone can", field)
                sizes = await asyncio.to_thread(self._input_sizes_now, source)
                held.add(sum(sizes))
                prompt = asked.fields.prompt
                remix = functools.partial(self._remix_now, retried=retried)
                made, new = await asyncio.to_thread(remix, source, prompt, caller, idempotency_key)
        return Accepted(seen=await self._look(made, new))

    @contextlib.contextmanager
    def _repeating(self, request: Request) -> Iterator[bool]:
        """Give whether an earlier try of a request may have been accepted; remember when certainly none was."""
        retried = self.retries.repeats(request)
        try:
            yield retried
        except MaybeAccepted:
            raise
        except (HttpError, WanTpuError):
            if not retried:
                self.retries.refuse(request)
            raise

    async def _look(self, job: Job, new: bool) -> EstimatedJob:
        """Return what is answered. This fails no more: the job is there."""
        size = "{width}x{height}x{frames}".format(**job.request)
        steps, owner = job.request["steps"], job.owner or None
        log_event(log, "accepted" if new else "known", job=job.id, owner=owner, size=size, steps=steps)
        try:
            return await asyncio.to_thread(self.look_now, job.id, job.owner)
        except WanTpuError as error:
            log_event(log, "not looked at", logging.WARNING, job=job.id, reason=str(error))
            return job, None

    def look_now(self, job: str, owner: str | None) -> EstimatedJob:
        """Return a job and in how many seconds it will be done, if that is known; raises `JobNotFound`."""
        found = self.store.look(job, owner)
        return found, self.forecast.eta_s(found)

    def look_at_all_now(self, jobs: Iterable[str]) -> dict[str, EstimatedJob]:
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
            counts, waiting = self.store.count_jobs(), deliveries.count_waiting(self.database)
        except StoreUnavailable as error:  # this process has figures still
            log_event(log, "database", logging.WARNING, reason=str(error))
            return generate_latest(self.meters.registry)
        return generate_latest(ServiceMetrics([*others, mine], counts, waiting))

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
                tasks.create_task(repeat(log, "heartbeats and keys", in_thread, every_s))

    def _refuse_early_now(self, caller: Caller, idempotency_key: str | None) -> None:
        self._check_disk()
        with self._queue_full():
            self.store.check_room(caller.owner, idempotency_key, caller.room)

    def _accept_now(
        self, job: Job, pngs: Sequence[bytes], room: Room, *, webhook_url: str | None = None
    ) -> tuple[Job, bool]:
        with self._queue_full():
            return self.acceptance.accept(job, pngs, webhook_url=webhook_url, room=room)

    def _check_source(self, source: Job) -> None:
        """Raise `HttpError` where a job's model isn't this service's any more: no worker would make its remix."""
        model = source.model or source.request["model"]
        if model != self.settings.model:
            message = f"{source.id} was made by {model!r}, which isn't here; there is {self.settings.model!r}"
            message += ": send its request as a new one"
            raise HttpError(400, message, code="model_not_found", param="model")

    def _input_sizes_now(self, source: Job) -> list[int]:
        with _inputs_of(source):
            return [self.storage.size(name) for name in source.inputs]

    def _remix_now(
        self, source: Job, prompt: str, caller: Caller, idempotency_key: str | None, *, retried: bool
    ) -> tuple[Job, bool]:
        digest = hashlib.sha256(f"{source.id}\0{prompt}".encode()).hexdigest()
        known = self.store.find_repeat(caller.owner, idempotency_key, digest, retried=retried)
        if known is not None:
            return known, False
        with _inputs_of(source):
            pngs = [self.storage.read(name) for name in source.inputs]
        made = Job(
            owner=caller.owner,
            model=self.settings.model,
            request=source.request | {"prompt": prompt},
            input_image=None if source.input_image is None else image_name(),
            input_last_image=None if source.input_last_image is None else image_name(),
            priority=min(source.priority, caller.priority),
            idempotency_key=idempotency_key,
            body_digest=digest,
            remixed_from=source.id,
        )
        return self._accept_now(made, pngs, caller.room)

    @contextlib.contextmanager
    def _queue_full(self) -> Iterator[None]:
        try:
            yield
        except QueueFull as full:
            raise HttpError(429, str(full), code="queue_full", after_s=self.forecast.next_free_s()) from None

    def _check_disk(self) -> None:
        free, kept = self.storage.free(), self.settings.limits.free_bytes
        if free is not None and free < kept:
            raise StorageError(f"{self.storage.location()} has {free} bytes left, {kept} are kept free; make room")

    def _send_heartbeat(self) -> None:
        send_heartbeat(self.database, self._heartbeat())
        self._recorded = time.monotonic()

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(name=self._name, kind="ingress", metrics=self.meters.text())


@contextlib.contextmanager
def _inputs_of(source: Job) -> Iterator[None]:
    try:
        yield
    except Missing:
        raise JobNotFound(f"{source.id} is gone with its image: it was deleted, or has expired") from None
