"""Accept requests: receive a body, draft its job, and commit it."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping

from starlette.requests import Request

from actors.api.core.acceptance import Acceptance, MaybeAccepted
from actors.api.core.access import Access, Caller
from actors.api.core.bodies import parse_body
from actors.api.core.drafts import Drafts, Take
from actors.api.core.errors import HttpError
from actors.api.core.inputs import Inputs
from actors.api.core.receiving import Bodies
from actors.api.core.retries import Retries
from actors.api.estimates import Estimator
from actors.api.fair_semaphore import Work
from actors.api.settings import ServiceSettings
from actors.api.untrusted.reader import Reader
from actors.api.untrusted.references import FILES, VIDEO
from actors.jobs.errors import JobNotFound, QueueFull
from actors.jobs.retention import Retention
from actors.jobs.sharing import FileGone
from actors.jobs.store import JobStore, make_private_key
from actors.jobs.stored_request import count_left
from actors.jobs.tables import Job
from actors.jobs.values import Room
from actors.observe.logs import log_event
from wan_tpu.errors import InvalidRequest, WanTpuError
from wan_tpu.spec import ModelSpec
from wan_tpu.storage.base import Missing, Storage

log = logging.getLogger(__name__)

# Threads for what waits for the storage: a key whose files are large or slow has at most half of them.
_TRANSFERS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accepted:
    """A job that was accepted, and its private key if only this request waits for it."""

    job: Job
    private: str | None = None


class Intake:
    """Turns requests into jobs."""

    def __init__(
        self,
        settings: ServiceSettings,
        spec: ModelSpec,
        store: JobStore,
        storage: Storage,
        retention: Retention,
        access: Access,
        forecast: Estimator,
        work: Work,
    ) -> None:
        self._settings, self._store, self._storage = settings, store, storage
        self._access, self._forecast, self._work = access, forecast, work
        self._bodies, self._reader, self.retries = Bodies(settings.limits), Reader(settings.limits), Retries()
        self._transfers = Work(_TRANSFERS, _TRANSFERS // 2)
        inputs = Inputs(settings.fetch, self._reader, self._transfers, store, storage)
        self._drafts = Drafts(settings, spec, inputs, work)
        self._acceptance = Acceptance(store, storage, retention)

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
            idempotency_key: Repeated requests with this key get the same job.
            alone: Whether to cancel the job if this request's client disconnects. The job then gets a private key.
        """
        make_draft, purpose = (self._drafts.draft_extension, "extend") if extends else (self._drafts.draft, "")
        with self._note_refusals(request) as is_retry:
            self._bodies.check(request.headers, caller.owner)
            # What an earlier try has stored counts already, and may have been accepted: it is looked for first.
            room = dataclasses.replace(caller.room, stored=None) if is_retry else caller.room
            await asyncio.to_thread(self._refuse_early, caller.owner, idempotency_key, room)
            with self._bodies.admit(request.headers, caller.owner) as incoming:
                async with parse_body(request, incoming, self._reader, self._work, purpose=purpose) as body:
                    sent = caller.owner, idempotency_key, body.digest
                    job = await asyncio.to_thread(self._store.find_repeat, *sent, is_retry=is_retry)
                    if job is None:
                        segments = 1 + len(body.fields.next_prompts or ())
                        stored = caller.room.stored if is_retry else None  # Once is enough.
                        room = dataclasses.replace(room, stored=stored)
                        await asyncio.to_thread(self._refuse_early, caller.owner, idempotency_key, room, segments)
                        draft, contents = await make_draft(body, incoming, caller)
                # From here on, no reading process is held and none of its time limits applies.
                is_new, private = False, make_private_key() if alone and idempotency_key is None else None
                if job is None:
                    draft.idempotency_key = private or idempotency_key
                    # A job without files waits for no other's.
                    run = functools.partial(self._transfers.run, caller.owner) if contents else asyncio.to_thread
                    job, is_new = await run(self._accept, draft, contents, caller.room, body.fields.webhook_url)
                assert job is not None
        _log_accepted(job, is_new)
        return Accepted(job=job, private=private if is_new else None)

    async def remix(
        self, job: str, request: Request, caller: Caller, idempotency_key: str | None, *, segment: int | None = None
    ) -> Accepted:
        """Accept a job that repeats another job's request with a new prompt; raises `JobNotFound`.

        With `segment`, only the segment of that number is made again, with a seed of its own.
        """
        with self._note_refusals(request) as is_retry:
            await asyncio.to_thread(self._refuse_early, caller.owner, idempotency_key, caller.room)
            source = await asyncio.to_thread(self._store.get, job, caller.sees)
            self._check_source(source)
            with self._bodies.admit(request.headers, caller.owner) as incoming:
                async with parse_body(request, incoming, self._reader, self._work) as body:
                    able = {"prompt"} if segment is None else {"prompt", "seed"}
                    more = body.fields.model_fields_set - able | {name for name in FILES if body.has(name)}
                    if more:
                        field, known = min(more), " and ".join(sorted(able))
                        raise InvalidRequest(
                            f"{field} can't be changed when a video is made again; only {known}", field
                        )
                take = Take(body.fields.prompt, segment, getattr(body.fields, "seed", None))
                remix = functools.partial(self._remix, is_retry=is_retry)
                accepted, is_new = await self._transfers.run(caller.owner, remix, source, take, caller, idempotency_key)
        _log_accepted(accepted, is_new)
        return Accepted(job=accepted)

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

    # The methods below wait for database and storage, and run in threads.

    def _refuse_early(self, owner: str, idempotency_key: str | None, room: Room, segments: int = 1) -> None:
        self._settings.limits.check_disk(self._storage)
        with self._translate_queue_full():
            self._store.check_room(owner, idempotency_key, room, self._settings.model, segments)

    def _accept(
        self, job: Job, contents: Mapping[str, bytes], room: Room, webhook_url: str | None = None
    ) -> tuple[Job, bool]:
        segments, is_new = count_left(job.request), False
        self._access.charge_segments(job.owner, segments)
        try:
            with self._translate_queue_full(), _translate_gone(job):
                accepted, is_new = self._acceptance.accept(job, contents, webhook_url=webhook_url, room=room)
        except MaybeAccepted:
            is_new = True
            raise
        finally:
            if not is_new:
                self._access.refund_segments(job.owner, segments)
        return accepted, is_new

    def _check_source(self, source: Job) -> None:
        """Raise `HttpError` if a job's model isn't served any more, since no worker would make its remix."""
        model = source.model or source.request["model"]
        if model != self._settings.model:
            message = (
                f"{source.id} was made by {model!r}, which this service doesn't offer; its model is "
                f"{self._settings.model!r}: send its request as a new one"
            )
            raise HttpError(400, message, code="model_not_found", param="model")

    def _remix(
        self, source: Job, take: Take, caller: Caller, idempotency_key: str | None, *, is_retry: bool
    ) -> tuple[Job, bool]:
        digest = take.digest(source)
        known = self._store.find_repeat(caller.owner, idempotency_key, digest, is_retry=is_retry)
        if known is not None:
            return known, False
        new_job = self._drafts.draft_remix(source, take, caller)
        new_job.idempotency_key, new_job.body_digest = idempotency_key, digest
        with _translate_gone(new_job):
            for name in new_job.inputs:
                self._storage.size(name)
            return self._accept(new_job, {}, caller.room)

    @contextlib.contextmanager
    def _translate_queue_full(self) -> Iterator[None]:
        try:
            yield
        except QueueFull as full:
            raise HttpError(429, str(full), code="queue_full", after_s=self._forecast.estimate_next_free_s()) from None


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


def _log_accepted(job: Job, is_new: bool) -> None:
    size = "{width}x{height}x{frames}".format(**job.request)
    steps, owner = job.request["steps"], job.owner or None
    log_event(log, "accepted" if is_new else "known", job=job.id, owner=owner, size=size, steps=steps)
