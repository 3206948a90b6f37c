"""Bodies and images read in processes of their own, which have little memory, little time and no secrets."""

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

from actors.api.intake.apart import IMAGE, PICTURE, Parts
from actors.api.intake.reader_process import REFUSED
from actors.api.intake.turns import Turns
from actors.api.limits import Limits
from wan_tpu.errors import InvalidRequest

_CHILD = "actors.api.intake.reader_process"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """An RGB PNG that this program has written itself, in the size of its video; the size of what was sent, pixels."""

    png: bytes
    width: int
    height: int


class Reading:
    """What a process has found.

    parts   texts and fields; what `upload` holds stays in the process
    upload  SHA-256 of the image's file, None where there is none
    size    (height, width) of that image
    """

    def __init__(self, child: "_Child", said: dict[str, Any]) -> None:
        self._child = child
        fields = said["fields"]
        self.parts = Parts(text=said["text"], fields=None if fields is None else [tuple(pair) for pair in fields])
        self.upload: str | None = said["upload"]
        self.size: tuple[int, int] | None = None if said["size"] is None else tuple(said["size"])

    async def picture(self, height: int, width: int, *, crop: bool) -> Picture:
        """Return the image in that size; raises `InvalidRequest`."""
        assert self.size is not None
        line = json.dumps({"height": height, "width": width, "crop": crop}).encode() + b"\n"
        png = await asyncio.to_thread(self._child.answer, line)
        return Picture(png=png, height=self.size[0], width=self.size[1])


class Reader:
    """Reads for all who send something, in turn by their keys."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._turns = Turns(limits.readers)

    @contextlib.asynccontextmanager
    async def read(self, content_type: str, content: bytes, key: str) -> AsyncIterator[Reading]:
        """Give what a body of that type, or an image's file, holds; raises `InvalidRequest`, in the block too."""
        if content_type == PICTURE and len(content) > self.limits.image_bytes:
            raise InvalidRequest(f"the image has more than {self.limits.image_bytes} bytes; shrink it first", IMAGE)
        async with self._turns.turn(key):
            child = await asyncio.to_thread(_Child, self.limits)
            try:
                async with asyncio.timeout(self.limits.reader_s):
                    said = await asyncio.to_thread(child.read, content_type, content)
                    yield Reading(child, json.loads(said))
            except TimeoutError:
                raise _too_costly() from None
            finally:
                child.kill()  # also when the client has gone away meanwhile
                await asyncio.shield(asyncio.to_thread(child.close))


class _Child:
    """One process. Its methods wait for it: call them in threads, which `kill` wakes up.

    From a thread, since the event loop of uvicorn runs Python between fork and exec, in a process with many threads.
    """

    def __init__(self, limits: Limits) -> None:
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", _CHILD, str(limits.reader_cpu_s), str(limits.reader_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path), "PATH": os.defpath},
        )

    def read(self, content_type: str, content: bytes) -> bytes:
        """Hand it the content, and return what it says."""
        given, said = self._process.stdin, self._process.stdout
        assert given is not None and said is not None
        head = json.dumps({"type": content_type, "bytes": len(content)}).encode()
        with contextlib.suppress(BrokenPipeError):  # it says why
            given.write(head + b"\n")
            given.write(content)
            given.flush()
        return said.readline() or self._failed()

    def answer(self, line: bytes) -> bytes:
        """Tell it something, and return all that it writes then."""
        given, said = self._process.stdin, self._process.stdout
        assert given is not None and said is not None
        with contextlib.suppress(BrokenPipeError):
            given.write(line)
            given.flush()
        made = said.read()
        return made if self._process.wait() == 0 and made else self._failed()

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
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _too_costly() -> InvalidRequest:
    return InvalidRequest("what was sent needs more memory or time to read than it gets; save the image again, smaller")
