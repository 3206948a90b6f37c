"""The HTTP application: the `/v1/videos` API, models, usage, health, metrics, and a web page."""

import asyncio
import base64
import contextlib
import functools
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi_offline import FastAPIOffline
from prometheus_client import generate_latest

from actors.api.core.access import Caller, read_bearer
from actors.api.core.errors import HttpError
from actors.api.core.service import Service
from actors.api.http.admin import SlicesReader, add_admin
from actors.api.http.error_answers import HANDLERS
from actors.api.http.middleware import Middleware
from actors.api.http.models import Model, ModelList, describe_model
from actors.api.http.objects import KeyUsage, UsageList
from actors.api.http.openapi import DESCRIPTION, TAGS, describe, describe_errors
from actors.api.http.parameters import Served, Watcher, refuse_body
from actors.api.http.videos import POLL_AFTER, router
from actors.api.metrics import CONTENT_TYPE, KeyMetrics
from actors.api.predictions import PredictedPool
from actors.jobs.errors import StoreUnavailable
from actors.jobs.keys import OPERATE, READ
from actors.jobs.tables import Usage
from actors.jobs.usage import read_usage

_STARTED = int(time.time())

other_routes = APIRouter()
_NO_BODY = [Depends(refuse_body)]


def make_app(
    service: Service, read_slices: SlicesReader = lambda: None, pools: Sequence[PredictedPool] = ()
) -> FastAPI:
    """Return the application for an opened service. It closes the service's database when it ends.

    Args:
        service: The service.
        read_slices: Returns what a pipeline's replicas report, or None while that can't be read.
        pools: The pipeline's pools, with what is predicted for them.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        current = asyncio.create_task(service.stay_current())
        try:
            yield
        finally:
            current.cancel()
            service.database.close()

    app = FastAPIOffline(  # Its /docs page loads no script from another server.
        title="wan-tpu",
        description=DESCRIPTION,
        openapi_tags=TAGS,
        version="1",
        lifespan=lifespan,
        redoc_url=None,
        exception_handlers=HANDLERS,
        redirect_slashes=False,  # `Middleware` strips them.
    )
    app.state.service = service
    app.include_router(router)
    app.include_router(other_routes)
    add_admin(app, read_slices, pools)
    settings = service.settings
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # OpenAI's Node client sends a dozen headers of its own, from browsers too.
            expose_headers=[POLL_AFTER, "Retry-After", "x-request-id", "x-video-id"],
        )
    app.add_middleware(Middleware, service=service)
    # It takes a fifth of a second, and only whoever opens /docs asks for it.
    app.openapi = functools.cache(functools.partial(describe, app.openapi))  # type: ignore[method-assign]
    return app


@other_routes.get(
    "/v1/models",
    tags=["models"],
    summary="List the models",
    response_description="The models.",
    responses=describe_errors(),
)
async def list_models(service: Served, caller: Watcher) -> ModelList:
    """Return what can be asked for, with its tasks, stages, defaults and limits."""
    names = (service.settings.model, *service.settings.aliases)
    return ModelList(data=[describe_model(service.settings, service.spec, _STARTED, name) for name in names])


_ModelName = Annotated[str, Path(description="The `id` of a model, or of an alias.")]


@other_routes.get(
    "/v1/models/{name:path}",
    tags=["models"],
    summary="Get a model",
    response_description="The model.",
    responses=describe_errors(404),
)
async def retrieve_model(service: Served, name: _ModelName, caller: Watcher) -> Model:
    """Return one model, by its name or an alias."""
    if name not in (service.settings.model, *service.settings.aliases):
        raise HttpError(404, f"there is no model {name[:80]!r}; GET /v1/models lists them", code="model_not_found")
    return describe_model(service.settings, service.spec, _STARTED, name)


_DAY = r"^\d{4}-\d{2}-\d{2}$"


@other_routes.get(
    "/v1/usage",
    tags=["usage"],
    summary="Get usage by key",
    response_description="The usage.",
    responses=describe_errors(),
)
async def usage(
    service: Served,
    caller: Watcher,
    first: Annotated[str, Query(pattern=_DAY, description="The first day that counts, UTC.")] = "2000-01-01",
    last: Annotated[str, Query(pattern=_DAY, description="The last day that counts, UTC.")] = "9999-12-31",
) -> UsageList:
    """Return what your key has used; with the scope `operate`, what every key has."""
    used_by_key = await asyncio.to_thread(read_usage, service.database, caller.sees, first=first, last=last)
    stored = await asyncio.to_thread(service.stored.read)
    stored = {key: size for key, size in stored.items() if caller.sees in (None, key)}
    data = [
        KeyUsage(
            key=key,
            name=service.access.get_name(key),
            videos=used.videos,
            failed=used.failed,
            chip_seconds=round(used.chip_seconds, 3),
            dollars=round(used.dollars, 6),
            stored_bytes=stored.get(key, 0),
        )
        for key, used in {**dict.fromkeys(stored, Usage(owner="", day="")), **used_by_key}.items()
    ]
    return UsageList(data=data, first=first, last=last)


@other_routes.get(
    "/health",
    tags=["service"],
    summary="Check that it answers",
    response_description="It answers.",
    responses=describe_errors(),
    dependencies=_NO_BODY,
)
async def health() -> JSONResponse:
    """Say that this process answers, and nothing about database, storage or workers."""
    return JSONResponse({"status": "ok"})


@other_routes.get(
    "/ready",
    tags=["service"],
    summary="Check that it takes jobs",
    response_description="It takes jobs.",
    responses=describe_errors(),
    dependencies=_NO_BODY,
)
async def ready(service: Served) -> JSONResponse:
    """Say that database and storage can be read and written, and how many workers there are; 503 where they can't."""
    workers = await asyncio.to_thread(service.presence.count_workers)
    return JSONResponse({"status": "ok", "workers": workers})


@other_routes.get(
    "/metrics",
    tags=["service"],
    summary="Get figures for Prometheus",
    response_class=Response,
    responses=describe_errors() | {200: {"description": "The figures.", "content": {CONTENT_TYPE: {}}}},
    dependencies=_NO_BODY,
)
async def metrics(request: Request, service: Served) -> Response:
    """Return the figures of all processes. They name no job and no prompt.

    With a key they say what it has used; with the scope `operate`, what every key has.
    """
    caller = None
    if not service.access.required or "authorization" in request.headers:
        caller = service.access.admit(read_bearer(request.headers.get("authorization")), (READ, OPERATE))
    return Response(await asyncio.to_thread(_read_figures_now, service, caller), media_type=CONTENT_TYPE)


def _read_figures_now(service: Service, caller: Caller | None) -> bytes:
    figures = service.presence.read_metrics()
    if caller is not None:
        with contextlib.suppress(StoreUnavailable):  # The figures of this process are still available.
            figures += generate_latest(KeyMetrics(read_usage(service.database, caller.sees)))
    return figures


@other_routes.get("/", include_in_schema=False, dependencies=_NO_BODY)
async def page() -> HTMLResponse:
    """Return the page for people."""
    return _answer_page("page.html")


@other_routes.get("/admin", include_in_schema=False, dependencies=_NO_BODY)
async def admin_page() -> HTMLResponse:
    """Return the page for operators, which is empty until it has been given a key."""
    return _answer_page("admin.html")


@other_routes.get("/offline.js", include_in_schema=False, dependencies=_NO_BODY)
async def offline_script() -> Response:
    """Return the service worker that keeps both pages, so that they open while the service is down."""
    text = (files("actors.api.http") / "offline.js").read_text()
    return Response(text, media_type="text/javascript", headers={"Cache-Control": "no-cache"})


def _answer_page(name: str) -> HTMLResponse:
    text = (files("actors.api.http") / name).read_text()
    return HTMLResponse(text, headers={"Cache-Control": "no-cache", "Content-Security-Policy": _make_policy(text)})


def _make_policy(text: str) -> str:
    """Return a Content-Security-Policy that permits only the page's own script, and requests only to this service."""
    script = text.partition("<script>")[2].partition("</script>")[0]
    known = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{known}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src 'self' blob: data:; media-src 'self' blob:; worker-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
