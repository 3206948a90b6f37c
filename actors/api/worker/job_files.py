"""The files of a claimed job: in storage, and on this machine's disk for as long as an attempt lasts."""

import asyncio
import contextlib
import functools
import hashlib
import logging
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from actors.api.worker.context import WorkerContext
from actors.api.worker.failures import InputGone
from actors.errors import PipelineError
from actors.jobs.errors import CommitUncertain, LeaseLost, StoreUnavailable
from actors.jobs.tables import Job
from actors.observe.logs import log_event
from actors.retrying import back_off, retry
from wan_tpu.errors import Unavailable
from wan_tpu.media.temporary import open_folder
from wan_tpu.storage.base import Missing, StorageError

log = logging.getLogger(__name__)

T = TypeVar("T")
_LONGEST_PAUSE_S = 15.0  # Between attempts to store a result.
_CHUNK = 2**20


class JobFiles:
    """Reads and writes a job's files, and insists while database or storage are unavailable."""

    def __init__(self, context: WorkerContext, job: Job, pause: Callable[[float], Awaitable[None]]) -> None:
        self._context, self._job, self._pause = context, job, pause  # The last one stops new claims for some seconds.
        self._storage, self._limits = context.storage, context.settings.reliability
        self._folder: Path | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Keep files on this machine until the block ends; raises `Unavailable`."""
        with contextlib.ExitStack() as stack:
            try:
                self._folder = await asyncio.to_thread(stack.enter_context, open_folder())
            except OSError as error:
                raise Unavailable(f"this machine has no room for temporary files ({error.strerror})") from None
            yield

    def get_path(self, name: str) -> Path:
        """Return where a file is, or can be written, on this machine."""
        assert self._folder is not None
        return self._folder / name.replace("/", "_")

    async def fetch(self, name: str) -> Path:
        """Return a file of storage on this machine, where it is copied first; raises as `read`, or `Unavailable`."""
        path = self.get_path(name)
        if not path.exists():
            await self.read(self._download, name, path)
        return path

    async def read(self, read: Callable[..., T], *args: Any) -> T:
        """Return what a function returns that reads the job's files.

        Raises:
            InputGone: Storage doesn't have one of them.
            PipelineError: Storage is unavailable.
        """
        try:
            return await self.insist(read, *args)
        except Missing:
            raise InputGone from None
        except StorageError as error:  # Not the job's fault: as a job's own error it would fail every waiting job.
            raise PipelineError("the job's inputs can't be read now") from error

    async def write(self, contents: Mapping[str, tuple[str, Path | bytes]], part: str | None = None) -> dict[str, str]:
        """Store files; return their names in storage, which are unique to this attempt and their content.

        Args:
            contents: Each file's ending and content, by a key. What this machine's disk has room for is left where
                `fetch` looks.
            part: The part of the job's video that they belong to; None for the whole.
        """
        names, sizes = {}, {}
        for key, (ending, content) in contents.items():
            digest = (await asyncio.to_thread(_compute_digest, content))[:16]
            parts = [self._job.id, str(self._job.attempts), *([part] if part else []), digest, ending]
            names[key] = ".".join(parts)
            sizes[names[key]] = len(content) if isinstance(content, bytes) else content.stat().st_size
        await self.insist(self._context.queue.announce, self._job, sizes)
        for key, (_, content) in contents.items():
            await self._store(names[key], content)
            with contextlib.suppress(OSError):  # It is in storage now.
                await asyncio.to_thread(_leave, content, self.get_path(names[key]))
        return names

    async def insist(self, change: Callable[..., T], *args: Any) -> T:
        """Call a function that uses the database or storage, and retry while they are unavailable.

        Raises:
            LeaseLost: The job isn't this worker's any more.
            StorageError: Storage was unavailable `input_attempts` times.
        """
        failures: list[Exception] = []

        async def note(error: Exception, _pause_s: float) -> None:
            failures.append(error)
            if isinstance(error, StorageError) and len(failures) == self._limits.input_attempts:
                raise error
            log_event(log, "tried again", logging.WARNING, job=self._job.id, reason=str(error))

        unavailable = (StoreUnavailable, StorageError)
        try:
            return await retry(functools.partial(asyncio.to_thread, change, *args), unavailable, back_off(10.0), note)
        except LeaseLost:
            if any(isinstance(error, CommitUncertain) for error in failures):
                job = await asyncio.to_thread(self._context.store.get, self._job.id)
                if job.has_ended:
                    return job  # type: ignore[return-value] # An earlier try ended it, but its answer was lost.
            raise

    async def _store(self, name: str, content: Path | bytes) -> None:
        """Write a result, retrying without limit, since the next job couldn't store its video either."""

        async def note(error: Exception, pause_s: float) -> None:
            log_event(log, "not stored yet", logging.WARNING, job=self._job.id, reason=str(error))
            await self._pause(2 * pause_s)  # So that no job is claimed in between.

        upload = functools.partial(asyncio.to_thread, self._upload, name, content)
        await retry(upload, (StorageError,), back_off(_LONGEST_PAUSE_S), note)

    def _upload(self, name: str, content: Path | bytes) -> None:
        if isinstance(content, bytes):
            self._storage.write(name, content)
            return
        with content.open("rb") as source, self._storage.writing(name) as target:
            shutil.copyfileobj(source, target, _CHUNK)

    def _download(self, name: str, path: Path) -> None:
        with contextlib.closing(self._storage.open(name)) as source:
            try:
                with _writing(path) as partial, partial.open("wb") as target:
                    while chunk := source.read(_CHUNK):
                        target.write(chunk)
            except OSError as error:
                raise Unavailable(f"this machine has no room for a video's parts ({error.strerror})") from None


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[Path]:
    """Yield where to write a file that then appears at once, or not at all."""
    partial = path.with_name(f"{secrets.token_hex(8)}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_folder() -> None:
    """Raise `Unavailable` if this machine has no place for temporary files."""
    try:
        with open_folder():
            pass
    except OSError as error:
        raise Unavailable(f"this machine has no room for temporary files ({error.strerror})") from None


def _leave(content: Path | bytes, path: Path) -> None:
    """Write a file at once, or not at all."""
    if isinstance(content, bytes):
        with _writing(path) as partial:
            partial.write_bytes(content)
    else:
        content.replace(path)


def _compute_digest(content: Path | bytes) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
