"""The HTTP application: OpenAI's videos API, models, health, figures and a page for people."""

import asyncio
import base64
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi_offline import FastAPIOffline

from actors.api import failures
from actors.api.failures import Problem
from actors.api.guard import Guard
from actors.api.metrics import CONTENT_TYPE
from actors.api.service import Service
from actors.api.videos import Owner, errors, router, service_of

_STARTED = int(time.time())

rest = APIRouter()


def make_app(service: Service) -> FastAPI:
    """Return the application over an opened service, which it closes at its end."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        telling = asyncio.create_task(service.tell())
        try:
            yield
        finally:
            telling.cancel()
            service.close()

    app = FastAPIOffline(  # its page of the API asks no other server for its script
        title="wan-tpu",
        description="Video generation. OpenAI's videos API, and some fields and routes more.",
        version="1",
        lifespan=lifespan,
        redoc_url=None,
    )
    app.state.service = service
    failures.install(app)
    app.include_router(router)
    app.include_router(rest)
    settings = service.settings
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "Idempotency-Key"],
            expose_headers=["openai-poll-after-ms", "Retry-After"],
        )
    names = None if settings.with_keys else settings.names
    app.add_middleware(
        Guard, body_bytes=settings.body_bytes, names=names, origins=settings.origins, meters=service.meters
    )
    described = app.openapi()
    for path in described["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # FastAPI's own; such requests are answered with 400 here
    return app


@rest.get("/v1/models", tags=["models"], responses=errors())
async def models(request: Request, owner: Owner) -> JSONResponse:
    """List what can be asked for; `tasks` says what a model makes: videos of text (t2v), of an image and text (i2v)."""
    return JSONResponse({"object": "list", "data": [await _model(service_of(request))]})


@rest.get("/v1/models/{model:path}", tags=["models"], responses=errors(404))
async def model(request: Request, model: str, owner: Owner) -> JSONResponse:
    """Return one model."""
    service = service_of(request)
    if model != service.settings.model:
        raise Problem(404, f"there is no model {model[:80]!r}; GET /v1/models lists them", code="model_not_found")
    return JSONResponse(await _model(service))


@rest.get("/health", tags=["service"], responses=errors())
async def health() -> JSONResponse:
    """Say that this process answers."""
    return JSONResponse({"status": "ok"})


@rest.get("/ready", tags=["service"], responses=errors())
async def ready(request: Request) -> JSONResponse:
    """Say that jobs can be accepted: database and storage can be used. 503 where not."""
    state = await asyncio.to_thread(service_of(request).state_now)
    return JSONResponse({"status": "ok", "workers": state["workers"]})


@rest.get(
    "/metrics", tags=["service"], response_class=Response, responses=errors() | {200: {"content": {CONTENT_TYPE: {}}}}
)
async def metrics(request: Request) -> Response:
    """Return the figures of all processes for Prometheus. They name no job and no prompt."""
    return Response(await asyncio.to_thread(service_of(request).metrics_now), media_type=CONTENT_TYPE)


@rest.get("/", include_in_schema=False)
async def page() -> HTMLResponse:
    """Return the page for people."""
    text = (files("actors.api") / "page.html").read_text()
    return HTMLResponse(text, headers={"Cache-Control": "no-cache", "Content-Security-Policy": _policy(text)})


def _policy(text: str) -> str:
    """Return a policy under which this page's own script runs, nothing else does, and nothing is asked elsewhere."""
    script = text.partition("<script>")[2].partition("</script>")[0]
    known = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{known}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src 'self' blob: data:; media-src 'self' blob:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


async def _model(service: Service) -> dict[str, Any]:
    tasks = await asyncio.to_thread(service.tasks_now)
    known = {} if tasks is None else {"tasks": tasks}
    return {"id": service.settings.model, "object": "model", "created": _STARTED, "owned_by": "wan-tpu"} | known
