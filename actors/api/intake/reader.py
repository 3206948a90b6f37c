"""Read bodies and images in separate processes that have little memory, little time and no secrets."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NoReturn, TypeVar

from actors.api.intake.body_parts import PICTURE, Parts
from actors.api.intake.fair_semaphore import FairSemaphore
from actors.api.intake.reader_process import LENGTH, REFUSED
from actors.api.intake.references import IMAGE
from actors.api.limits import Limits
from wan_tpu.errors import InvalidRequest

T = TypeVar("T")
_CHILD = "actors.api.intake.reader_process"


class Reading:
    """What a process has read.

    Attributes:
        parts: The fields. Images stay in the process.
        uploads: SHA-256 of each image's file, by the name of its field.
        sizes: (height, width) of each image, likewise.
    """

    def __init__(self, run: "_Run", answer: dict[str, Any]) -> None:
        self._run = run
        self.parts = Parts(text=answer["text"])
        self.uploads: dict[str, str] = answer["uploads"]
        self.sizes: dict[str, tuple[int, int]] = {name: (size[0], size[1]) for name, size in answer["sizes"].items()}

    async def make_picture(
        self,
        height: int,
        width: int,
        *,
        slack: int,
        name: str = IMAGE,
        count: Callable[[int], None] = lambda size: None,
    ) -> bytes:
        """Return an image as an RGB PNG that this program has encoded itself. Each image can be taken once.

        Args:
            height: The height to fit the image to.
            width: The width.
            slack: An image whose shape differs by fewer pixels of a side is resized without being cropped.
            name: The image's field.
            count: Called with the size of the PNG before it is loaded here. Its exceptions pass through.

        Raises:
            InvalidRequest: The image can't be fitted, or the process has used up its resources.
        """
        wanted = {"name": name, "height": height, "width": width, "slack": slack}
        length = await self._run.wait_for(self._run.child.make, wanted)
        count(length)
        return await self._run.wait_for(self._run.child.take, length)


class Reader:
    """Starts reading processes, for which keys take turns."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._turns = FairSemaphore(limits.readers, max(1, limits.readers - 1))  # Leaves one free for others.
        self._threads = ThreadPoolExecutor(
            2 * limits.readers, "reader"
        )  # Enough even while some wait for a killed process.
        self.fetches = FairSemaphore(limits.fetches, max(1, limits.fetches // 4))

    @contextlib.asynccontextmanager
    async def read(self, content_type: str, content: IO[bytes], key: str) -> AsyncIterator[Reading]:
        """Read a file that holds a body of that type or an image; raises `InvalidRequest`, also within the block.

        The process has read the file when the block begins. Only the time in which it works counts against its limit,
        however long the block lasts.
        """
        size = content.seek(0, os.SEEK_END)
        if content_type == PICTURE and size > self.limits.image_bytes:
            raise InvalidRequest(f"the image has more than {self.limits.image_bytes} bytes; shrink it first", IMAGE)
        content.seek(0)
        in_thread = asyncio.get_running_loop().run_in_executor
        async with self._turns.take_turn(key):
            child = await in_thread(self._threads, _Child, self.limits, content.fileno())
            run = _Run(child, self._threads, self.limits.reader_s)
            try:
                yield Reading(run, await run.wait_for(child.ask, content_type))
            finally:
                child.kill()  # Also if the client has gone away meanwhile.
                await asyncio.shield(in_thread(self._threads, child.close))


class _Run:
    """A process and the time it has left. Only the time in which something waits for it counts."""

    def __init__(self, child: "_Child", threads: ThreadPoolExecutor, left_s: float) -> None:
        self.child, self._threads, self._left_s = child, threads, left_s

    async def wait_for(self, ask: Callable[[Any], T], message: Any) -> T:
        """Return the process's answer; raises `InvalidRequest`, also if its time is up."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            async with asyncio.timeout(self._left_s):
                return await loop.run_in_executor(self._threads, ask, message)
        except TimeoutError:
            self.child.kill()
            raise _build_too_costly_error() from None
        finally:
            self._left_s -= loop.time() - start


class _Child:
    """One process. Its methods wait for it, so call them in threads; `kill` wakes these up.

    It is started from a thread because uvicorn's event loop would run Python between fork and exec, in a process with
    many threads.
    """

    def __init__(self, limits: Limits, content: int) -> None:
        arguments = map(str, (content, limits.reader_cpu_s, limits.reader_bytes))
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", _CHILD, *arguments],
            pass_fds=[content],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path), "PATH": os.defpath},
        )

    def ask(self, content_type: str) -> dict[str, Any]:
        """Return the process's description of the content."""
        answer: dict[str, Any] = json.loads(self._send(content_type).readline() or self._raise_failure())
        return answer

    def make(self, wanted: dict[str, Any]) -> int:
        """Make the process encode a picture, and return its size in bytes."""
        return int.from_bytes(self._send(wanted).read(LENGTH), "big") or self._raise_failure()

    def take(self, length: int) -> bytes:
        """Return the picture."""
        assert self._process.stdout is not None
        picture = self._process.stdout.read(length)
        return picture if len(picture) == length else self._raise_failure()

    def _send(self, message: Any) -> IO[bytes]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(BrokenPipeError):  # The process reports why it has ended.
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        return stdout

    def _raise_failure(self) -> NoReturn:
        assert self._process.stderr is not None
        reason = self._process.stderr.read()
        if self._process.wait() == REFUSED:
            message, field = json.loads(reason.splitlines()[-1])
            raise InvalidRequest(message, field)
        raise _build_too_costly_error()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def close(self) -> None:
        """Wait for the killed process to end."""
        with contextlib.suppress(BrokenPipeError), self._process:
            pass


def _build_too_costly_error() -> InvalidRequest:
    return InvalidRequest("what was sent needs more memory or time to read than it gets; save the image again, smaller")
