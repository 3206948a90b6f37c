"""Routes for operators, and their page: the state of queues, processes and slices, failures, costs, and API keys."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Path, Request
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actors.api.core.access import Caller
from actors.api.core.errors import HttpError
from actors.api.core.service import Service
from actors.api.http.job_failures import explain
from actors.api.http.objects import Object
from actors.api.http.openapi import describe_errors
from actors.api.http.parameters import Served, require_scopes
from actors.api.predictions import AdminStage, PredictedPool, compare
from actors.jobs.check_ins import list_check_ins
from actors.jobs.keys import ADMIN, OPERATE, KeyLimits, list_keys, make_key, revoke_key
from actors.jobs.overview import Overview, read_overview
from actors.jobs.tables import ApiKey, CheckIn, Job
from actors.jobs.usage import read_usage
from actors.observe.status_board import ReportedStatus

SlicesReader = Callable[[], ReportedStatus | None]
Scope = Literal["make", "read", "operate", "admin"]

_BODY = 16_384  # The longest body, in bytes.
_BODY_S = 10  # How long it may take.
_MAX_SLICES = 500

router = APIRouter(prefix="/v1/admin", tags=["admin"])
_Operator = Annotated[Caller, Depends(require_scopes(OPERATE, ADMIN))]
_Admin = Annotated[Caller, Depends(require_scopes(ADMIN))]
_Sender = Annotated[Caller, Depends(require_scopes(ADMIN, body=True))]


class AdminQueue(Object):
    """The jobs of a key for one model, of one priority."""

    key: str
    """Id of the key; empty where the service has none."""
    name: str
    """The key's name."""
    model: str | None
    """The model."""
    priority: int
    """Higher ones are made first."""
    waiting: int
    """Jobs that wait."""
    segments: int
    """Segments that those have left."""
    oldest_seconds: float
    """How long the oldest of them has waited; 0 if none does."""
    running: int
    """Jobs that run."""


class AdminJob(Object):
    """A job that runs."""

    id: str
    """The video's id."""
    name: str
    """The name of its key."""
    stage: str | None
    """The stage that computes."""
    step: int | None
    """The last finished step."""
    steps: int | None
    """How many it has."""
    percent: float
    """How much of it is done."""
    seconds: float
    """How long ago it was first started."""
    attempts: int
    """How often a worker has begun it."""
    worker: str | None
    """The worker that runs it."""


class AdminProcess(Object):
    """A process of the service."""

    name: str
    """Its name, with its machine's."""
    kind: str
    """`ingress` or `worker`."""
    seen_seconds: float
    """How long ago it checked in."""
    jobs: int | None
    """Jobs that a worker has under way; null for others."""


class AdminWork(Object):
    """What a slice computes, or has paused."""

    stage: str
    """The stage."""
    id: str
    """The video's id."""


class AdminSlice(Object):
    """A slice."""

    name: str
    """The pool and the replica that leads the slice."""
    pool: str
    """Its pool."""
    where: str
    """Its hosts; empty where they aren't known."""
    activity: str
    """`starting`, `loading`, `compiling`, `idle`, `busy`, `draining`, `failed`, `refused` or `unknown`."""
    detail: str
    """Why it has failed, or what it waits for."""
    work: list[AdminWork]
    """What it computes now, or has paused."""
    since: float | None
    """Unix seconds when that was reported."""
    utilisation: float
    """The fraction of `utilisation_seconds` for which it has computed, from 0 to 1."""


class AdminFailures(Object):
    """Jobs that failed within a day, of one kind."""

    code: str
    """The error code."""
    blame: str
    """What is to blame."""
    count: int
    """How many."""


class AdminFailure(Object):
    """A job that has failed."""

    id: str
    """The video's id."""
    name: str
    """The name of its key."""
    code: str
    """The error code."""
    blame: str
    """What is to blame."""
    message: str
    """What its owner is told."""
    attempts: int
    """How often a worker has begun it."""
    ended_at: float
    """Unix seconds."""


class AdminCost(Object):
    """What the jobs that ended within a day came to; failed ones count with what they had computed."""

    videos: int
    """Videos that have completed."""
    failed: int
    """Jobs that failed or were cancelled."""
    chip_seconds: float
    """What all of them computed, in seconds of one chip."""
    dollars: float
    """What that costs, where the price of the chips is known."""
    dollars_a_video: float | None
    """All dollars by completed videos; null where there is neither."""
    seconds_a_video: float | None
    """From a video's first start to its end, on average."""


class AdminState(Object):
    """The state of a service, for its operators. It holds no prompt and no secret."""

    object: Literal["admin.state"] = "admin.state"
    now: float
    """Unix seconds by the database's clock."""
    queues: list[AdminQueue]
    """What waits and runs, by key, model and priority."""
    running: list[AdminJob]
    """The jobs that run, oldest first."""
    processes: list[AdminProcess]
    """The service's processes."""
    slices: list[AdminSlice]
    """The slices, by pool."""
    stages: list[AdminStage]
    """Predicted and measured seconds of the pools' stages, by kind of video."""
    utilisation_seconds: float
    """How many seconds `utilisation` covers: an hour, or since the workers were started."""
    failures: list[AdminFailures]
    """Failures of the last day, by kind."""
    failed: list[AdminFailure]
    """The latest of them."""
    cost: AdminCost
    """What the last day's jobs came to."""


class AdminKey(Object):
    """An API key, without its secret."""

    id: str
    """Names it; the first part of its text."""
    name: str
    """For people."""
    scopes: list[str]
    """What it may do."""
    created_at: float
    """Unix seconds."""
    expires_at: float | None
    """Unix seconds; null for never."""
    revoked_at: float | None
    """Unix seconds; null while it is in force."""
    requests_per_minute: float | None
    """How many requests it may send; null for the service's limit."""
    waiting: int | None
    """How many segments of its jobs for one model may wait; null for the service's limit."""
    running: int | None
    """How many of its jobs may run at a time; null for any number."""
    priority: int
    """The highest priority that it may ask for."""
    videos: int
    """Videos of the last 30 days."""
    dollars: float
    """What its jobs of the last 30 days cost, where prices are known."""
    stored_bytes: int
    """What the files of its jobs and its uploads take, at most a minute ago."""


class AdminKeyMade(Object):
    """A new key."""

    key: AdminKey
    """What lists have of it."""
    secret: str
    """The key's text, which is stored nowhere and shown only now."""


class AdminKeyList(Object):
    """All keys, oldest first."""

    object: Literal["list"] = "list"
    data: list[AdminKey]
    """The keys, revoked ones included."""


class NewKey(BaseModel):
    """The key to make."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(description="Its name, such as its user's: 1 to 64 letters, digits, spaces or . _ @ -")
    scopes: list[Scope] = Field(["make", "read"], min_length=1, description="What it may do.")
    requests_per_minute: float | None = Field(None, description="How many requests it may send, on average.")
    waiting: int | None = Field(None, description="How many segments of its jobs for one model may wait.")
    running: int | None = Field(None, description="How many of its jobs may run at a time.")
    priority: int = Field(0, description="The highest priority that it may ask for.")
    days: float | None = Field(None, description="For how many days from now it is valid.")


@router.get(
    "/state",
    summary="Get the state of the service",
    response_description="The state.",
    responses=describe_errors(),
)
async def read_state(request: Request, service: Served, caller: _Operator) -> AdminState:
    """Return queues, processes, slices, failures and costs. It takes a key with the scope `operate` or `admin`."""
    state = request.app.state
    return await asyncio.to_thread(_read_state, service, state.read_slices, state.pools)


@router.get("/keys", summary="List the keys", response_description="The keys.", responses=describe_errors())
async def list_all_keys(service: Served, caller: _Admin) -> AdminKeyList:
    """Return all API keys with their limits and use, without their secrets. It takes a key with the scope `admin`."""
    return AdminKeyList(data=await asyncio.to_thread(_list_keys, service))


@router.post(
    "/keys",
    summary="Make a key",
    response_description="The key, with its secret.",
    responses=describe_errors(408, 409),
    openapi_extra={
        "requestBody": {
            "description": "The key to make.",
            "required": True,
            "content": {"application/json": {"schema": NewKey.model_json_schema()}},
        }
    },
)
async def add_key(request: Request, service: Served, caller: _Sender) -> AdminKeyMade:
    """Make an API key and return its text, this once. It takes a key with the scope `admin`.

    The first key of a service may be made without one. From then on, every request needs a key.
    """
    try:
        new = NewKey.model_validate_json(await _receive(request))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or None
        reason = "there is no such field" if first["type"] == "extra_forbidden" else first["msg"]
        raise HttpError(400, f"{field or 'the body'}: {reason}", code="invalid_value", param=field) from None
    if any(key.name == new.name and key.revoked_at is None for key in await asyncio.to_thread(_list_keys, service)):
        message = f"name: a key named {new.name!r} is in force; revoke it first, or give another name"
        raise HttpError(409, message, code="conflict", param="name")
    limits = KeyLimits(**new.model_dump(exclude={"name", "scopes"}), scopes=tuple(new.scopes))
    if not service.access.required and ADMIN not in limits.scopes:
        raise HttpError(
            400,
            "scopes: the first key needs the scope admin, since nobody without a key could make another one",
            code="invalid_value",
            param="scopes",
        )
    secret = await asyncio.to_thread(make_key, service.database, new.name, limits)
    await asyncio.to_thread(service.access.refresh)
    [made] = [key for key in await asyncio.to_thread(_list_keys, service) if key.id == secret.split("_")[1]]
    return AdminKeyMade(key=made, secret=secret)


@router.delete(
    "/keys/{key_id}",
    summary="Revoke a key",
    response_description="The key, revoked.",
    responses=describe_errors(404, 409),
)
async def revoke(
    service: Served, caller: _Admin, key_id: Annotated[str, Path(description="The key's `id`.")]
) -> AdminKey:
    """Revoke an API key: every process refuses it within a second. It takes a key with the scope `admin`."""
    keys = await asyncio.to_thread(_list_keys, service)
    if not [key for key in keys if key.id == key_id and key.revoked_at is None]:
        raise HttpError(
            404, f"no key in force has the id {key_id[:40]!r}; GET /v1/admin/keys lists them", code="no_key"
        )
    if key_id == caller.owner:
        raise HttpError(409, "a key can't revoke itself; use another one", code="conflict")
    await asyncio.to_thread(revoke_key, service.database, key_id)
    await asyncio.to_thread(service.access.refresh)
    [revoked] = [key for key in await asyncio.to_thread(_list_keys, service) if key.id == key_id]
    return revoked


def add_admin(app: FastAPI, read_slices: SlicesReader, pools: Sequence[PredictedPool]) -> None:
    """Add the routes to an application."""
    app.state.read_slices, app.state.pools = read_slices, pools
    app.include_router(router)


async def _receive(request: Request) -> bytes:
    """Return a short body; raises `HttpError` 408 or 413. It is read once its sender is known to be an admin."""
    content = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async with contextlib.aclosing(request.stream()) as parts:
                async for part in parts:
                    content += part
                    if len(content) > _BODY:
                        raise HttpError(413, f"the body has more than {_BODY} bytes", code="too_large")
    except TimeoutError:
        message = f"the body did not arrive within {_BODY_S} s"
        raise HttpError(408, message, code="too_slow", headers={"Connection": "close"}) from None
    return bytes(content)


def _read_state(service: Service, read_slices: SlicesReader, pools: Sequence[PredictedPool]) -> AdminState:
    overview = read_overview(service.database)
    present = list_check_ins(service.database, service.settings.reliability.absent_s)
    figures = [_read_figures(process) for process in present]
    names = {key.id: key.name for key in list_keys(service.database)}
    window_s = max((one.window_s for one in figures), default=0.0)
    return AdminState(
        now=overview.now,
        queues=[AdminQueue(name=names.get(queue.key, ""), **vars(queue)) for queue in overview.queues],
        running=[
            AdminJob(
                id=job.id,
                name=names.get(job.owner, ""),
                stage=job.progress.stage if job.progress else None,
                step=job.progress.step if job.progress else None,
                steps=job.progress.steps if job.progress else None,
                percent=job.progress.percent if job.progress else 0,
                seconds=round(max(0.0, overview.now - (job.started_at or overview.now)), 1),
                attempts=job.attempts,
                worker=job.worker,
            )
            for job in overview.running
        ],
        processes=[
            AdminProcess(
                name=process.name,
                kind=process.kind,
                seen_seconds=round(max(0.0, overview.now - process.received_at), 1),
                jobs=one.jobs if process.kind == "worker" else None,
            )
            for process, one in zip(present, figures, strict=True)
        ],
        slices=_list_slices(read_slices(), figures, window_s),
        stages=compare(pools, _list_own_jobs(service), service.spec),
        utilisation_seconds=round(window_s, 1),
        failures=[
            AdminFailures(code=code, blame=explain(code).blame, count=count)
            for code, count in sorted(overview.failures.items(), key=lambda entry: -entry[1])
        ],
        failed=[
            AdminFailure(
                id=job.id,
                name=names.get(job.owner, ""),
                code=job.error_code or "",
                blame=explain(job.error_code or "").blame,
                message=job.error_message or "",
                attempts=job.attempts,
                ended_at=job.ended_at or 0.0,
            )
            for job in overview.failed
        ],
        cost=_sum_cost(overview),
    )


@dataclasses.dataclass
class _Figures:
    """What a process's metrics say: its jobs, for how long it has noted what slices compute, and seconds by slice."""

    jobs: int = 0
    window_s: float = 0.0
    busy_s: dict[str, float] = dataclasses.field(default_factory=dict)


def _read_figures(process: CheckIn) -> _Figures:
    figures = _Figures()
    for family in text_string_to_metric_families(process.metrics):
        for sample in family.samples:
            match sample.name:
                case "wan_worker_jobs":
                    figures.jobs = int(sample.value)
                case "wan_slice_window_seconds":
                    figures.window_s = sample.value
                case "wan_slice_busy_seconds":
                    figures.busy_s[sample.labels["slice"]] = sample.value
    return figures


def _list_slices(reported: ReportedStatus | None, figures: list[_Figures], window_s: float) -> list[AdminSlice]:
    """Return the slices that replicas have reported, and others that workers have heard of."""
    busy_s: dict[str, float] = {}
    for one in figures:
        for name, seconds in one.busy_s.items():
            busy_s[name] = busy_s.get(name, 0.0) + seconds
    replicas = reported.replicas if reported is not None else {}
    # A replica that has ended is of no interest, even if it has computed.
    names = sorted(replicas) if reported is not None else sorted(busy_s)
    slices = []
    for name in names[:_MAX_SLICES]:
        replica = replicas.get(name)
        slices.append(
            AdminSlice(
                name=name,
                pool=replica.pool if replica else name.partition("/")[0],
                where=replica.where if replica else "",
                activity=replica.activity if replica else "unknown",
                detail=replica.detail if replica else "",
                work=[AdminWork(stage=stage, id=id) for stage, id in replica.work] if replica else [],
                since=replica.since if replica else None,
                utilisation=round(min(1.0, busy_s.get(name, 0.0) / max(window_s, 1.0)), 3),
            )
        )
    return slices


def _list_own_jobs(service: Service) -> list[Job]:
    return [job for job in service.forecast.list_latest() if job.model in (None, service.settings.model)]


def _sum_cost(overview: Overview) -> AdminCost:
    known = overview.dollars > 0 and overview.completed > 0
    return AdminCost(
        videos=overview.completed,
        failed=sum(overview.failures.values()),
        chip_seconds=round(overview.chip_seconds, 1),
        dollars=round(overview.dollars, 4),
        dollars_a_video=round(overview.dollars / overview.completed, 4) if known else None,
        seconds_a_video=None if overview.seconds is None else round(overview.seconds, 1),
    )


def _list_keys(service: Service) -> list[AdminKey]:
    first = time.strftime("%Y-%m-%d", time.gmtime(time.time() - 29 * 86400))
    used = read_usage(service.database, first=first)
    stored = service.stored.read()
    return [_describe_key(key, used.get(key.id), stored.get(key.id, 0)) for key in list_keys(service.database)]


def _describe_key(key: ApiKey, used: Any, stored_bytes: int) -> AdminKey:
    same = ("id", "name", "created_at", "expires_at", "revoked_at", "requests_per_minute", "waiting", "running")
    return AdminKey(
        **{name: getattr(key, name) for name in same},
        scopes=key.scopes.split(","),
        priority=key.priority,
        videos=used.videos if used else 0,
        dollars=round(used.dollars, 4) if used else 0.0,
        stored_bytes=stored_bytes,
    )
