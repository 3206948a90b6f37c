"""Images fetched from servers of a test."""

import asyncio
import contextlib
import dataclasses
import io

from actors.api.outbound.client import fetch
from tests.actors.api.conftest import NAME

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"  # Both this machine; only the first is allowed in these tests.


def answer(content=b"", status="200 OK", **headers):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def resolver(**names):
    """Returns a resolver of names with "_" for ".", and the list of what it was asked."""
    lookups = []

    async def resolve(host, port):
        lookups.append(host)
        addresses = names[host.replace(".", "_")]
        return addresses.pop(0) if addresses and isinstance(addresses[0], list) else addresses

    return resolve, lookups


@contextlib.asynccontextmanager
async def running(server, settings, *, address=HERE, port=0):
    async with await server.start(address, port):
        yield dataclasses.replace(settings, ports=settings.ports | {server.port}), f"https://{NAME}:{server.port}"


async def fetch_bytes(url, settings):
    into = io.BytesIO()
    await fetch(url, settings, into)
    return into.getvalue()


def run_and_fetch(server, settings, path="/cat.png", **changes):
    """Run a server and fetch a path from it."""

    async def do():
        async with running(server, settings) as (ready, base):
            return await fetch_bytes(base + path, dataclasses.replace(ready, **changes))

    return asyncio.run(do())
