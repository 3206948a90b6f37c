"""Read bodies, images and videos in separate processes that have little memory, little time and no secrets."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NoReturn, TypeVar

from actors.api.fair_semaphore import FairSemaphore
from actors.api.limits import ServiceLimits
from actors.api.untrusted.body_parts import CLIP, MEDIUM, PICTURE, Parts
from actors.api.untrusted.memory_file import open_memory_file
from actors.api.untrusted.reader_limits import ReaderLimits
from actors.api.untrusted.reader_process import END, LENGTH, REFUSED
from actors.api.untrusted.references import IMAGE, MOST_REFERENCES, REFERENCES, VIDEO
from wan_tpu.errors import InvalidRequest
from wan_tpu.media.shown import Fit

T = TypeVar("T")
Count = Callable[[int], None]
_CHILD = "actors.api.untrusted.reader_process"


def ignore(_size: int) -> None:
    """Count nothing."""


class Reading:
    """The content that a process has read."""

    def __init__(self, run: "_TimedProcess", answer: dict[str, Any]) -> None:
        self._run = run
        self.parts = Parts(text=answer["text"])  # The fields. Files stay in the process.
        self.uploads: dict[str, str] = answer["uploads"]  # SHA-256 of each file, by the name of its field.
        # (height, width) of each image and video, likewise.
        self.sizes: dict[str, tuple[int, int]] = {name: (size[0], size[1]) for name, size in answer["sizes"].items()}
        self.kinds: dict[str, str] = answer["kinds"]  # What each reference is, likewise.

    async def make_picture(self, fit: Fit, name: str = IMAGE, *, count: Count = ignore) -> bytes:
        """Return an image as an RGB PNG that this program has encoded itself. Each image can be taken once.

        Args:
            count: Called with the size of the PNG before it is loaded here. Its exceptions pass through.

        Raises:
            InvalidRequest: The image can't be fitted, or the process has used up its resources.
        """
        content, _ = await self._make({"name": name, **dataclasses.asdict(fit)}, count)
        return content

    async def cut_video(self, fit: Fit, frames: int, *, step: int, count: Count = ignore) -> bytes:
        """Return the first frames of the video as an mp4 that this program has encoded itself, without sound.

        If the video has fewer frames, a length is suggested that differs by a multiple of `step`.

        Raises:
            InvalidRequest: The video has fewer frames, or the process has used up its resources.
        """
        self._run.extend()
        options = {"name": VIDEO, "frames": frames, "step": step, **dataclasses.asdict(fit)}
        content, _ = await self._make(options, count)
        return content

    async def convert_video(self, fit: Fit, fps: float, *, count: Count = ignore) -> tuple[bytes, int, bytes]:
        """Return the whole video with its sound as such an mp4, its number of frames, and its last frame as a PNG.

        Raises:
            InvalidRequest: The video is too long, or the process has used up its resources.
        """
        self._run.extend()
        content, frames = await self._make({"name": VIDEO, "fps": fps, **dataclasses.asdict(fit)}, count)
        last, _ = await self._make({"name": END}, count)
        return content, frames, last

    async def make_reference(
        self,
        name: str,
        kind: str,
        height: int,
        width: int,
        *,
        with_sound: bool,
        seconds: float,
        count: Count = ignore,
    ) -> bytes:
        """Return a reference as a PNG or an mp4 of a size, or a wav of some seconds, that this program has encoded.

        Each can be taken once. It raises `InvalidRequest` if the process has used up its resources.
        """
        self._run.extend()
        options = {"name": name, "kind": kind, "height": height, "width": width}
        options |= {"with_sound": with_sound, "seconds": seconds}
        content, _ = await self._make(options, count)
        return content

    async def _make(self, options: dict[str, Any], count: Count) -> tuple[bytes, int]:
        length, frames = await self._run.wait_for(self._run.child.make, options)
        count(length)
        return await self._run.wait_for(self._run.child.take, length), frames


class Reader:
    """Starts reading processes, which keys get in turn."""

    def __init__(self, limits: ServiceLimits) -> None:
        self.limits = limits
        self._turns = FairSemaphore(limits.readers, max(1, limits.readers - 1))  # Leaves one free for others.
        self._threads = ThreadPoolExecutor(
            2 * limits.readers, "reader"
        )  # Enough even while some wait for a killed process.
        self.fetches = FairSemaphore(limits.fetches, max(1, limits.fetches // 4))

    @contextlib.asynccontextmanager
    async def read(self, content_type: str, content: IO[bytes], key: str) -> AsyncIterator[Reading]:
        """Read a file that holds a body of that type, an image or a video.

        It raises `InvalidRequest`, also within the block.

        The process has read the file when the block begins. Only the time in which it works counts against its limit,
        however long the block lasts.
        """
        size = content.seek(0, os.SEEK_END)
        if content_type == PICTURE and size > self.limits.image_bytes:
            raise InvalidRequest(f"the image has more than {self.limits.image_bytes} bytes; shrink it first", IMAGE)
        if content_type in (CLIP, MEDIUM) and size > self.limits.video_bytes:
            field = VIDEO if content_type == CLIP else REFERENCES
            raise InvalidRequest(f"the {content_type} has more than {self.limits.video_bytes} bytes; shrink it", field)
        content.seek(0)
        in_thread = asyncio.get_running_loop().run_in_executor
        async with self._turns.take_turn(key):
            child = await in_thread(self._threads, _Child, self.limits, content.fileno())
            run = _TimedProcess(child, self._threads, self.limits.reader_s, self.limits.video_wait_s)
            try:
                yield Reading(run, await run.wait_for(child.ask, content_type))
            finally:
                child.kill()  # Also if the client has gone away meanwhile.
                await asyncio.shield(in_thread(self._threads, child.close))


class _TimedProcess:
    """A process and the time it has left. Only the time in which something waits for it counts."""

    def __init__(self, child: "_Child", threads: ThreadPoolExecutor, left_s: float, more_s: float) -> None:
        self.child, self._threads, self._left_s, self._more_s = child, threads, left_s, more_s

    def extend(self) -> None:
        """Add the time for videos, once, however many there are: meanwhile others wait for a process."""
        self._left_s, self._more_s = self._left_s + self._more_s, 0.0

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

    def __init__(self, limits: ServiceLimits, content: int) -> None:
        with contextlib.ExitStack() as stack:
            # How many files the content has is known only to the process. A file that stays empty takes no memory.
            scratch = [stack.enter_context(open_memory_file()).fileno() for _ in range(1 + MOST_REFERENCES)]
            for descriptor in scratch:
                os.ftruncate(descriptor, limits.video_bytes)
            process_limits = ReaderLimits(
                file=content,
                scratch=tuple(scratch),
                memory=limits.reader_bytes,
                cpu_s=limits.reader_cpu_s,
                video_cpu_s=limits.video_cpu_s,
                video_pixels=limits.video_pixels,
                video_s=limits.video_s,
            )
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", _CHILD, json.dumps(dataclasses.asdict(process_limits))],
                pass_fds=[process_limits.file, *process_limits.scratch],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_build_environment(),
                start_new_session=True,  # So that what it has started ends with it.
            )

    def ask(self, content_type: str) -> dict[str, Any]:
        """Return the process's description of the content."""
        answer: dict[str, Any] = json.loads(self._send(content_type).readline() or self._raise_failure())
        return answer

    def make(self, options: dict[str, Any]) -> tuple[int, int]:
        """Make the process encode a picture or a video, and return its size in bytes and its number of frames."""
        numbers = self._send(options).read(2 * LENGTH)
        if len(numbers) < 2 * LENGTH:
            self._raise_failure()
        return int.from_bytes(numbers[:LENGTH], "big"), int.from_bytes(numbers[LENGTH:], "big")

    def take(self, length: int) -> bytes:
        """Return the picture or the video."""
        assert self._process.stdout is not None
        content = self._process.stdout.read(length)
        return content if len(content) == length else self._raise_failure()

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
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self.kill()  # What it has started may outlive it.
        if self._process.wait() == REFUSED:
            message, field = json.loads(reason.splitlines()[-1])
            raise InvalidRequest(message, field)
        raise _build_too_costly_error()

    def kill(self) -> None:
        """Kill the process and what it has started."""
        if self._process.returncode is None:  # Not waited for yet, so no other process has its number.
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Wait for the killed process to end."""
        with contextlib.suppress(BrokenPipeError), self._process:
            pass


def _build_environment() -> dict[str, str]:
    """Return a process's environment, without what is secret."""
    ffmpeg = os.environ.get("IMAGEIO_FFMPEG_EXE")
    return {
        "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
        "PATH": os.defpath,
        **({} if ffmpeg is None else {"IMAGEIO_FFMPEG_EXE": ffmpeg}),
    }


def _build_too_costly_error() -> InvalidRequest:
    return InvalidRequest(
        "the image or video needs more memory or time to read than the service allows; send a smaller one"
    )
