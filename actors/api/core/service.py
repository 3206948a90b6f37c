"""What an ingress process shares (database, storage, keys), and how it turns a request into a job."""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import generate_latest
from starlette.requests import Request

from actors.api.core.acceptance import Acceptance, MaybeAccepted
from actors.api.core.access import REFRESH_S, Access, Caller
from actors.api.core.bodies import parse_body
from actors.api.core.drafts import Drafts
from actors.api.core.errors import HttpError
from actors.api.core.extensions import Extensions
from actors.api.core.following import EstimatedJob, Streams, follow_jobs, follow_watched
from actors.api.core.receiving import Bodies
from actors.api.core.retries import Retries
from actors.api.core.sources import Sources, StoredFile
from actors.api.estimates import Estimator
from actors.api.fair_semaphore import Work
from actors.api.metrics import Meters, ServiceMetrics
from actors.api.settings import ServiceSettings
from actors.api.untrusted.reader import Reader
from actors.api.untrusted.references import FILES, VIDEO
from actors.jobs import deliveries
from actors.jobs.check_ins import check_in, list_check_ins, make_process_name
from actors.jobs.errors import JobNotFound, QueueFull, StoreUnavailable
from actors.jobs.retention import Retention
from actors.jobs.sharing import FileGone
from actors.jobs.store import JobStore, make_private_key, open_database
from actors.jobs.stored_request import count_segments
from actors.jobs.tables import CheckIn, Job
from actors.jobs.values import Room
from actors.jobs.watching import find_unchanged, look_at_watched
from actors.observe.logs import log_event, repeat
from wan_tpu.errors import InvalidRequest, WanTpuError
from wan_tpu.spec import ModelSpec
from wan_tpu.storage.base import Missing
from wan_tpu.storage.opening import open_storage

log = logging.getLogger(__name__)

_WORKERS = 2  # Threads for work that takes processor time, such as planning a request,
_TRANSFERS = 16  # and for what waits for the storage: a key whose files are large or slow has at most half of them.
_MISSED = 4  # After this many check-ins that couldn't be written, the ingress reports that it isn't ready.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accepted:
    """A job in the state in which it was accepted, and its private key if only this request waits for it."""

    seen: EstimatedJob
    private: str | None = None


class Service:
    """Everything that an ingress process opens once. Methods named `..._now` block on the database: call in threads."""

    def __init__(self, settings: ServiceSettings, spec: ModelSpec) -> None:
        """Open everything; raises `InvalidInput` if something can't be used."""
        self.settings, self.spec, self._limits = settings, spec, settings.reliability
        self.database = open_database(settings.database)
        self.store = JobStore(self.database, settings.jobs)
        self.storage = open_storage(settings.storage)
        self.retention = Retention(self.database, self.storage, settings.jobs)
        self.access = Access(self.database, settings.queue_limit, settings.limits)
        self.streams = Streams(settings.limits.followers)
        self.following = follow_jobs(self.look_at_all_now, self.access)
        self.watching = follow_watched(functools.partial(look_at_watched, self.database), self.access)
        self.bodies, self.reader = Bodies(settings.limits), Reader(settings.limits)
        self.work, self.transfers, self.retries = Work(_WORKERS), Work(_TRANSFERS, _TRANSFERS // 2), Retries()
        sources = Sources(self.store, self.storage)
        self.drafts = Drafts(settings, spec, self.reader, self.work, self.transfers, sources)
        self.extensions = Extensions(settings, spec, self.reader, self.work, self.transfers, sources, self.drafts)
        self.acceptance = Acceptance(self.store, self.storage, self.retention)
        self.forecast = Estimator(self.store, settings.concurrency, settings.model)
        self.meters = Meters()
        self._name, self._recorded = make_process_name("ingress"), time.monotonic()

    async def submit(
        self,
        request: Request,
        caller: Caller,
        idempotency_key: str | None,
        *,
        alone: bool = False,
        extends: bool = False,
    ) -> Accepted:
        """Accept a job, or raise the reason for rejecting it. No error but `MaybeAccepted` leaves an accepted job.

        Cheap checks come first: the queue before the body, and all fields before the files. What is refused before the
        job could be accepted costs its key no segments.

        Args:
            request: The request, whose body is read here.
            caller: Whose job it becomes.
            idempotency_key: Repeated requests with this key get the same job.
            alone: Whether to cancel the job if this request's client disconnects. The job then gets a private key.
            extends: Whether the job continues the body's video.
        """
        drafts = self.extensions if extends else self.drafts
        with self._note_refusals(request) as is_retry:
            self.bodies.check(request.headers, caller.owner)
            await asyncio.to_thread(self._refuse_early_now, caller, idempotency_key)
            with self.bodies.admit(request.headers, caller.owner) as incoming:
                async with parse_body(
                    request, incoming, self.reader, self.work, purpose="extend" if extends else ""
                ) as body:
                    known = functools.partial(self.store.find_repeat, is_retry=is_retry)
                    job = await asyncio.to_thread(known, caller.owner, idempotency_key, body.digest)
                    draft = None
                    if job is None:
                        segments = 1 + len(body.fields.next_prompts or ())
                        await asyncio.to_thread(self._refuse_early_now, caller, idempotency_key, segments)
                        draft = await drafts.draft(body, incoming, caller)
                # From here on, no reading process is held and none of its time limits applies.
                new, private = False, make_private_key() if alone and idempotency_key is None else None
                if draft is not None:
                    draft.job.idempotency_key = private or idempotency_key
                    accept = functools.partial(self._accept_now, webhook_url=draft.webhook_url)
                    # A job without files waits for no other's.
                    run = functools.partial(self.transfers.run, caller.owner) if draft.contents else asyncio.to_thread
                    job, new = await run(accept, draft.job, draft.contents, caller.room)
                assert job is not None
        return Accepted(seen=await self._look(job, new), private=private if new else None)

    async def remix(self, job: str, request: Request, caller: Caller, idempotency_key: str | None) -> Accepted:
        """Accept a job that repeats another job's request with a new prompt; raises `JobNotFound`."""
        with self._note_refusals(request) as is_retry:
            await asyncio.to_thread(self._refuse_early_now, caller, idempotency_key)
            source = await asyncio.to_thread(self.store.get, job, caller.sees)
            self._check_source(source)
            with self.bodies.admit(request.headers, caller.owner) as incoming:
                async with parse_body(request, incoming, self.reader, self.work) as body:
                    more = body.fields.model_fields_set - {"prompt"} | {name for name in FILES if body.has(name)}
                    if more:
                        field = min(more)
                        raise InvalidRequest(f"a remix can't change {field}; it can change only the prompt", field)
                prompt = body.fields.prompt
                remix = functools.partial(self._remix_now, is_retry=is_retry)
                new_job, new = await self.transfers.run(caller.owner, remix, source, prompt, caller, idempotency_key)
        return Accepted(seen=await self._look(new_job, new))

    @contextlib.contextmanager
    def _note_refusals(self, request: Request) -> Iterator[bool]:
        """Yield whether an earlier try of a request may have been accepted. Record a try that certainly was not."""
        is_retry = self.retries.repeats(request)
        try:
            yield is_retry
        except MaybeAccepted:
            raise
        except (HttpError, WanTpuError):
            if not is_retry:
                self.retries.refuse(request)
            raise

    async def _look(self, job: Job, new: bool) -> EstimatedJob:
        """Return an accepted job's current state. Errors are suppressed, since the job has been accepted anyway."""
        size = "{width}x{height}x{frames}".format(**job.request)
        steps, owner = job.request["steps"], job.owner or None
        log_event(log, "accepted" if new else "known", job=job.id, owner=owner, size=size, steps=steps)
        try:
            return await asyncio.to_thread(self.look_now, job.id, job.owner)
        except WanTpuError as error:
            log_event(log, "not looked at", logging.WARNING, job=job.id, reason=str(error))
            return job, None

    def look_now(self, job: str, owner: str | None) -> EstimatedJob:
        """Return a job with an estimate of its end; raises `JobNotFound`."""
        job_now = self.store.look(job, owner)
        return job_now, self.forecast.estimate_eta_s(job_now)

    def look_at_all_now(self, seen: Mapping[str, EstimatedJob]) -> dict[str, EstimatedJob]:
        """Return jobs that were seen as they are now, except those that don't exist. Only changed ones are read."""
        unchanged = find_unchanged(self.database, {id_: job for id_, (job, _) in seen.items()})
        changed = self.store.look_at_all(seen.keys() - unchanged)
        return {id_: seen[id_] for id_ in unchanged} | {
            job.id: (job, self.forecast.estimate_eta_s(job)) for job in changed
        }

    def read_metrics_now(self) -> bytes:
        """Return the metrics of all processes in Prometheus's text format."""
        mine = self._make_check_in()
        try:
            others = [
                other for other in list_check_ins(self.database, self._limits.absent_s) if other.name != mine.name
            ]
            counts, waiting = self.store.count_jobs(), deliveries.count_waiting(self.database)
        except StoreUnavailable as error:  # This process still has its own metrics.
            log_event(log, "database", logging.WARNING, reason=str(error))
            return generate_latest(self.meters.registry)
        return generate_latest(ServiceMetrics([*others, mine], counts, waiting))

    def count_workers_now(self) -> int:
        """Return the number of workers; raises if database or storage can't be read or written."""
        with contextlib.suppress(Missing):  # Any answer shows that the storage can be reached.
            self.storage.size("ready")
        self.settings.limits.check_disk(self.storage)
        longest_s = _MISSED * self._limits.check_in_s
        if time.monotonic() - self._recorded > longest_s:
            raise StoreUnavailable(f"{self.database} has accepted no writes for {longest_s:g} s")
        return [process.kind for process in list_check_ins(self.database, self._limits.absent_s)].count("worker")

    async def stay_current(self) -> None:
        """Check this process in with its metrics, and keep the keys up to date, until this is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for work, every_s in (
                (self._check_in, self._limits.check_in_s),
                (self.access.refresh, REFRESH_S),
            ):
                in_thread = functools.partial(asyncio.to_thread, work)
                tasks.create_task(repeat(log, "check-in and keys", in_thread, every_s))

    def _refuse_early_now(self, caller: Caller, idempotency_key: str | None, segments: int = 1) -> None:
        self.settings.limits.check_disk(self.storage)
        with self._translate_queue_full():
            self.store.check_room(caller.owner, idempotency_key, caller.room, self.settings.model, segments)

    def _accept_now(
        self, job: Job, contents: Sequence[bytes | StoredFile], room: Room, *, webhook_url: str | None = None
    ) -> tuple[Job, bool]:
        segments, is_new = count_segments(job.request), False
        self.access.charge_segments(job.owner, segments)
        try:
            with self._translate_queue_full(), _translate_gone(job):
                accepted, is_new = self.acceptance.accept(job, contents, webhook_url=webhook_url, room=room)
        except MaybeAccepted:
            is_new = True
            raise
        finally:
            if not is_new:
                self.access.refund_segments(job.owner, segments)
        return accepted, is_new

    def _check_source(self, source: Job) -> None:
        """Raise `HttpError` if a job's model isn't served any more, since no worker would make its remix."""
        model = source.model or source.request["model"]
        if model != self.settings.model:
            message = (
                f"{source.id} was made by {model!r}, which this service doesn't offer; its model is "
                f"{self.settings.model!r}"
            )
            message += ": send its request as a new one"
            raise HttpError(400, message, code="model_not_found", param="model")

    def _remix_now(
        self, source: Job, prompt: str, caller: Caller, idempotency_key: str | None, *, is_retry: bool
    ) -> tuple[Job, bool]:
        digest = hashlib.sha256(f"{source.id}\0{prompt}".encode()).hexdigest()
        known = self.store.find_repeat(caller.owner, idempotency_key, digest, is_retry=is_retry)
        if known is not None:
            return known, False
        new_job = Job(
            owner=caller.owner,
            model=self.settings.model,
            request=source.request | {"prompt": prompt},
            input_image=source.input_image,
            input_last_image=source.input_last_image,
            input_video=source.input_video,
            priority=min(source.priority, caller.priority),
            idempotency_key=idempotency_key,
            body_digest=digest,
            remixed_from=source.id,
        )
        with _translate_gone(new_job):
            for name in source.inputs:
                self.storage.size(name)
            return self._accept_now(new_job, [StoredFile(name) for name in source.inputs], caller.room)

    @contextlib.contextmanager
    def _translate_queue_full(self) -> Iterator[None]:
        try:
            yield
        except QueueFull as full:
            raise HttpError(429, str(full), code="queue_full", after_s=self.forecast.estimate_next_free_s()) from None

    def _check_in(self) -> None:
        check_in(self.database, self._make_check_in())
        self._recorded = time.monotonic()

    def _make_check_in(self) -> CheckIn:
        return CheckIn(name=self._name, kind="ingress", metrics=self.meters.format_text())


@contextlib.contextmanager
def _translate_gone(job: Job) -> Iterator[None]:
    """Raise errors of files that a job should share with the names of the jobs that they belong to."""
    try:
        yield
    except (FileGone, Missing):
        source = job.remixed_from or job.request.get("extended_from")
        message = f"{source} no longer exists: it was deleted, or has expired"
        if job.remixed_from is not None:
            raise JobNotFound(message) from None
        raise HttpError(400, message, code="video_not_found", param=VIDEO) from None
