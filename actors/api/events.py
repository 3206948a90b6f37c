"""A job's progress as server-sent events: the same objects that polling shows, whenever they change."""

import asyncio
from collections.abc import AsyncIterator

from actors.api.logs import told
from actors.api.objects import error_body
from actors.api.service import Service, log
from actors.jobs.errors import JobNotFound, StoreUnavailable

LOOK_S = 0.5
_ALIVE_S = 15.0  # between two signs of life, so that nothing on the way takes the connection for dead


async def events(service: Service, job: str, owner: str | None) -> AsyncIterator[str]:
    """Give "progress" events with the video, then one "completed" or "failed", after which the stream ends.

    A job that is deleted meanwhile ends with "error".
    """
    last, silent = "", 0.0
    while True:
        try:
            found, outlook = await asyncio.to_thread(service.look_now, job, owner)
        except JobNotFound as gone:
            yield _event("error", error_body(404, str(gone), code="video_not_found").model_dump_json())
            return
        except StoreUnavailable as error:
            told(log, "events wait", 30, job=job, reason=str(error))
        else:
            # An ETA alone is no news: it changes with every look.
            video = service.video(found, outlook)
            news = video.model_copy(update={"eta_seconds": None}).model_dump_json()
            if news != last:
                yield _event(found.status if found.ended else "progress", video.model_dump_json())
                last, silent = news, 0.0
            if found.ended:
                return
        await asyncio.sleep(LOOK_S)
        silent += LOOK_S
        if silent >= _ALIVE_S:
            yield ": still here\n\n"
            silent = 0.0


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"
