"""Imports the libraries of worker processes ahead of time: for computing, for Ray Serve and for the HTTP API.

Ray itself is not imported, because its library reads a worker's job and raylet from the environment when loaded.
"""

import contextlib

import aiohttp  # noqa: F401
import fastapi.responses  # noqa: F401
import httpx  # noqa: F401
import jsonschema  # noqa: F401
import opentelemetry.sdk.metrics
import opentelemetry.sdk.trace  # noqa: F401
import prometheus_client  # noqa: F401
import uvicorn.loops.uvloop
import uvicorn.protocols.http.httptools_impl  # noqa: F401

import wan_tpu.aot.programs
import wan_tpu.media.mp4  # noqa: F401
from wan_tpu.families import FAMILIES

with contextlib.suppress(ModuleNotFoundError):  # These are in the extra [serve], which batches don't need.
    import alembic.command  # noqa: F401
    import sqlalchemy.ext.asyncio  # noqa: F401

for _family in FAMILIES.values():
    _family.part(_family.model)
