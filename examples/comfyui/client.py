"""A wan-tpu service, as the nodes use it. Of ComfyUI's packages it needs only aiohttp."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import aiohttp

Video = dict[str, Any]  # The service's video object.
File = tuple[str, bytes]  # A name and a content.

_ENDED = ("completed", "failed")
_BUSY = (429, 502, 503, 504)  # The same request may succeed later.
_CANCEL_S = 10  # How long a cancelled node waits for the service to hear of it.


class ServiceError(Exception):
    """What the service says, or why it can't be reached: a sentence for people."""


class Service:
    """Makes, continues, follows and cancels videos of one service. Use it with `async with`.

    Args:
        address: The service's, such as "http://127.0.0.1:8000".
        key: An API key; empty if the service has none.
        patience_s: How long a service that has answered before may be silent or busy, as while it restarts.
    """

    def __init__(self, address: str, key: str = "", patience_s: float = 300):
        self._address, self._key, self._patience_s = address.rstrip("/"), key, patience_s
        self._session: aiohttp.ClientSession
        self._has_answered = False

    async def __aenter__(self) -> Service:
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def describe_model(self) -> dict[str, Any]:
        """Return the model's description, as in `GET /v1/models`."""
        return dict(json.loads(await self._call("GET", "/v1/models"))["data"][0])

    async def make(
        self,
        path: str,
        fields: Mapping[str, str],
        files: Mapping[str, File],
        on_change: Callable[[Video], Awaitable[None]],
    ) -> tuple[Video, bytes]:
        """Have a video made, and return its object and its mp4.

        Args:
            path: "/v1/videos", or "/v1/videos/extensions" for one that continues another.
            fields: The request's fields, as a form sends them.
            files: Its files.
            on_change: Called with the video object at each change of its progress.

        Raises:
            ServiceError: The request is refused, the video fails, or the service doesn't answer.
            asyncio.CancelledError: This was cancelled.

        Whatever it raises but the service's own words, the video is cancelled.
        """
        creating = asyncio.ensure_future(self._create(path, fields, files))
        try:
            video = await asyncio.shield(creating)
            return await self.fetch(video["id"], on_change)
        except ServiceError:
            raise
        except BaseException:
            cancelling = asyncio.ensure_future(asyncio.wait_for(self._cancel(creating), _CANCEL_S))
            while not cancelling.done():
                with contextlib.suppress(asyncio.CancelledError):  # ComfyUI may cancel what is being cancelled.
                    await asyncio.wait([cancelling])
            if not cancelling.cancelled():
                cancelling.exception()  # There is nobody to tell.
            raise

    async def fetch(self, video_id: str, on_change: Callable[[Video], Awaitable[None]]) -> tuple[Video, bytes]:
        """Wait for the end of a video, and return its object and its mp4."""
        video: Video = {}
        async for video in self._follow(video_id):
            await on_change(video)
        if video["status"] == "failed":
            raise ServiceError(video["error"]["message"])
        return video, await self.read(video_id)

    async def read(self, video_id: str, variant: str = "video") -> bytes:
        """Return a file of a video, such as its "thumbnail"."""
        return await self._call("GET", f"/v1/videos/{video_id}/content?variant={variant}")

    async def _create(self, path: str, fields: Mapping[str, str], files: Mapping[str, File]) -> Video:
        def make_form() -> aiohttp.FormData:
            form = aiohttp.FormData()
            for name, value in fields.items():
                form.add_field(name, value)
            for name, (filename, content) in files.items():
                form.add_field(name, content, filename=filename)
            return form

        # With the key, a request that is repeated because its answer got lost doesn't make a second video.
        return dict(json.loads(await self._call("POST", path, make_form, {"Idempotency-Key": str(uuid.uuid4())})))

    async def _cancel(self, creating: asyncio.Future[Video]) -> None:
        await self._call("POST", f"/v1/videos/{(await creating)['id']}/cancel")

    async def _follow(self, video_id: str) -> AsyncIterator[Video]:
        """Yield a video at each change until it has ended. Where its events can't be followed, it is polled."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
                async with self._session.get(f"{self._address}/v1/videos/{video_id}/events") as answer:
                    async for video in _read_events(answer):
                        yield video
                        if video["status"] in _ENDED:
                            return
            video = json.loads(await self._call("GET", f"/v1/videos/{video_id}"))
            yield video
            if video["status"] in _ENDED:
                return
            await asyncio.sleep(2)

    async def _call(
        self,
        method: str,
        path: str,
        make_form: Callable[[], aiohttp.FormData] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return the body of an answer. A service that is busy or restarts is asked again."""
        give_up, pause_s = time.monotonic() + self._patience_s, 1.0
        while True:
            try:
                async with self._session.request(
                    method, self._address + path, data=make_form() if make_form else None, headers=headers
                ) as answer:
                    content = await answer.read()
                    self._has_answered = True
                    if answer.status < 400:
                        return content
                    error = ServiceError(_read_error(answer.status, content))
                    if answer.status not in _BUSY:
                        raise error
                    wanted = answer.headers.get("Retry-After", "")
                    pause_s = float(wanted) if wanted.isdecimal() else pause_s
            except (TimeoutError, aiohttp.ClientError) as problem:
                error = ServiceError(
                    f"No wan-tpu service answers at {self._address} ({problem or type(problem).__name__}). "
                    "Is it running? WAN_TPU_URL says where, in the environment of ComfyUI."
                )
                if not self._has_answered:
                    raise error from None
            if time.monotonic() + pause_s > give_up:
                raise error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 10)


async def _read_events(answer: aiohttp.ClientResponse) -> AsyncIterator[Video]:
    """Yield the video objects of a stream of server-sent events, which holds one in each `data` line."""
    if answer.status != 200:
        return
    async for line in answer.content:
        name, _, value = line.decode().strip().partition(": ")
        if name == "data" and "status" in (video := json.loads(value)):
            yield video


def _read_error(status: int, content: bytes) -> str:
    """Return the sentence of an answer that isn't a success."""
    try:
        sentence = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        sentence = f"The service answered with status {status}."
    if status in (401, 403):
        sentence += " (ComfyUI sends the key in its environment variable WAN_TPU_API_KEY.)"
    return sentence
