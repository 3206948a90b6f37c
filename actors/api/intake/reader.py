"""Bodies and images read in processes of their own, which have little memory, little time and no secrets."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import IO, Any

from actors.api.intake.apart import IMAGE, PICTURE, Parts
from actors.api.intake.reader_process import LENGTH, REFUSED
from actors.api.intake.turns import Turns
from actors.api.limits import Limits
from wan_tpu.errors import InvalidRequest

_CHILD = "actors.api.intake.reader_process"


class Reading:
    """What a process has found.

    parts    texts and fields; images stay in the process
    uploads  SHA-256 of each image's file, by the name of its field; sizes  (height, width) of those images
    """

    def __init__(self, child: "_Child", said: dict[str, Any]) -> None:
        self._child = child
        fields = said["fields"]
        self.parts = Parts(text=said["text"], fields=None if fields is None else [tuple(pair) for pair in fields])
        self.uploads: dict[str, str] = said["uploads"]
        self.sizes: dict[str, tuple[int, int]] = {name: (size[0], size[1]) for name, size in said["sizes"].items()}

    async def picture(self, height: int, width: int, *, crop: bool, name: str = IMAGE) -> bytes:
        """Return an image in that size, once, as an RGB PNG of this program's own making; raises `InvalidRequest`."""
        wanted = {"name": name, "height": height, "width": width, "crop": crop}
        return await asyncio.to_thread(self._child.answer, wanted)


class Reader:
    """Reads for all who send something, in turn by their keys."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._turns = Turns(limits.readers, max(1, limits.readers - 1))  # one is free for others
        self.fetches = Turns(limits.fetches, max(1, limits.fetches // 4))

    @contextlib.asynccontextmanager
    async def read(self, content_type: str, content: IO[bytes], key: str) -> AsyncIterator[Reading]:
        """Give what a file holds, a body of that type or an image; raises `InvalidRequest`, in the block too."""
        size = content.seek(0, os.SEEK_END)
        if content_type == PICTURE and size > self.limits.image_bytes:
            raise InvalidRequest(f"the image has more than {self.limits.image_bytes} bytes; shrink it first", IMAGE)
        content.seek(0)
        async with self._turns.turn(key):
            child = await asyncio.to_thread(_Child, self.limits, content.fileno())
            try:
                async with asyncio.timeout(self.limits.reader_s):
                    yield Reading(child, json.loads(await asyncio.to_thread(child.ask, content_type)))
            except TimeoutError:
                raise _too_costly() from None
            finally:
                child.kill()  # also when the client has gone away meanwhile
                await asyncio.shield(asyncio.to_thread(child.close))


class _Child:
    """One process. Its methods wait for it: call them in threads, which `kill` wakes up.

    From a thread, since the event loop of uvicorn runs Python between fork and exec, in a process with many threads.
    """

    def __init__(self, limits: Limits, content: int) -> None:
        given = map(str, (content, limits.reader_cpu_s, limits.reader_bytes))
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", _CHILD, *given],
            pass_fds=[content],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path), "PATH": os.defpath},
        )

    def ask(self, content_type: str) -> bytes:
        """Return what it says of the content."""
        return self._tell(content_type).readline() or self._failed()

    def answer(self, wanted: dict[str, Any]) -> bytes:
        """Tell it something, and return what it writes then, after how long that is."""
        said = self._tell(wanted)
        length = int.from_bytes(said.read(LENGTH), "big")
        made = said.read(length)
        return made if length and len(made) == length else self._failed()

    def _tell(self, what: Any) -> IO[bytes]:
        given, said = self._process.stdin, self._process.stdout
        assert given is not None and said is not None
        with contextlib.suppress(BrokenPipeError):  # it says why
            given.write(json.dumps(what).encode() + b"\n")
            given.flush()
        return said

    def _failed(self) -> bytes:
        assert self._process.stderr is not None
        reason = self._process.stderr.read()
        if self._process.wait() == REFUSED:
            message, field = json.loads(reason.splitlines()[-1])
            raise InvalidRequest(message, field)
        raise _too_costly()

    def kill(self) -> None:
        """End it."""
        self._process.kill()

    def close(self) -> None:
        """See it end, once killed."""
        with contextlib.suppress(BrokenPipeError), self._process:
            pass


def _too_costly() -> InvalidRequest:
    return InvalidRequest("what was sent needs more memory or time to read than it gets; save the image again, smaller")
