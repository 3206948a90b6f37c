"""Bodies and images read in processes of their own, which have little memory, little time and no secrets."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NoReturn, TypeVar

from actors.api.intake.apart import PICTURE, Parts
from actors.api.intake.fair_semaphore import FairSemaphore
from actors.api.intake.reader_process import LENGTH, REFUSED
from actors.api.intake.references import IMAGE
from actors.api.limits import Limits
from wan_tpu.errors import InvalidRequest

T = TypeVar("T")
_CHILD = "actors.api.intake.reader_process"


class Reading:
    """What a process has found.

    parts    the fields; images stay in the process
    uploads  SHA-256 of each image's file, by the name of its field; sizes  (height, width) of those images
    """

    def __init__(self, run: "_Run", said: dict[str, Any]) -> None:
        self._run = run
        self.parts = Parts(text=said["text"])
        self.uploads: dict[str, str] = said["uploads"]
        self.sizes: dict[str, tuple[int, int]] = {name: (size[0], size[1]) for name, size in said["sizes"].items()}

    async def picture(
        self,
        height: int,
        width: int,
        *,
        slack: int,
        name: str = IMAGE,
        count: Callable[[int], None] = lambda size: None,
    ) -> bytes:
        """Return an image in that size, once, as an RGB PNG of this program's own making; raises `InvalidRequest`.

        count  called with the size of the PNG before it is held here; what it raises is raised
        """
        wanted = {"name": name, "height": height, "width": width, "slack": slack}
        length = await self._run.wait_for(self._run.child.make, wanted)
        count(length)
        return await self._run.wait_for(self._run.child.take, length)


class Reader:
    """Reads for all who send something, in turn by their keys."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._turns = FairSemaphore(limits.readers, max(1, limits.readers - 1))  # one is free for others
        self._threads = ThreadPoolExecutor(2 * limits.readers, "reader")  # also while one waits for a killed process
        self.fetches = FairSemaphore(limits.fetches, max(1, limits.fetches // 4))

    @contextlib.asynccontextmanager
    async def read(self, content_type: str, content: IO[bytes], key: str) -> AsyncIterator[Reading]:
        """Give what a file holds, a body of that type or an image; raises `InvalidRequest`, in the block too.

        The process has read the file when the block begins. Its time is what it works, however long the block lasts.
        """
        size = content.seek(0, os.SEEK_END)
        if content_type == PICTURE and size > self.limits.image_bytes:
            raise InvalidRequest(f"the image has more than {self.limits.image_bytes} bytes; shrink it first", IMAGE)
        content.seek(0)
        in_thread = asyncio.get_running_loop().run_in_executor
        async with self._turns.turn(key):
            child = await in_thread(self._threads, _Child, self.limits, content.fileno())
            run = _Run(child, self._threads, self.limits.reader_s)
            try:
                yield Reading(run, await run.wait_for(child.ask, content_type))
            finally:
                child.kill()  # also when the client has gone away meanwhile
                await asyncio.shield(in_thread(self._threads, child.close))


class _Run:
    """The time that a process has left, of which only what it is waited for counts."""

    def __init__(self, child: "_Child", threads: ThreadPoolExecutor, left_s: float) -> None:
        self.child, self._threads, self._left_s = child, threads, left_s

    async def wait_for(self, ask: Callable[[Any], T], what: Any) -> T:
        """Return what the process answers; raises `InvalidRequest`, also when its time is up."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            async with asyncio.timeout(self._left_s):
                return await loop.run_in_executor(self._threads, ask, what)
        except TimeoutError:
            self.child.kill()
            raise _too_costly() from None
        finally:
            self._left_s -= loop.time() - start


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

    def ask(self, content_type: str) -> dict[str, Any]:
        """Return what it says of the content."""
        said: dict[str, Any] = json.loads(self._tell(content_type).readline() or self._failed())
        return said

    def make(self, wanted: dict[str, Any]) -> int:
        """Have it make a picture, and return how many bytes that has."""
        return int.from_bytes(self._tell(wanted).read(LENGTH), "big") or self._failed()

    def take(self, length: int) -> bytes:
        """Return the picture."""
        assert self._process.stdout is not None
        made = self._process.stdout.read(length)
        return made if len(made) == length else self._failed()

    def _tell(self, what: Any) -> IO[bytes]:
        given, said = self._process.stdin, self._process.stdout
        assert given is not None and said is not None
        with contextlib.suppress(BrokenPipeError):  # it says why
            given.write(json.dumps(what).encode() + b"\n")
            given.flush()
        return said

    def _failed(self) -> NoReturn:
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
