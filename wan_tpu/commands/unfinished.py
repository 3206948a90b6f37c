"""What an unfinished video has become, kept so that the same command goes on from there after a kill.

The encoder's result and the newest state are files in the user's cache folder, under a digest of everything that
determines them. They are written beside the steps, at most every `EVERY_S`, so a video that takes less leaves none.
Nothing depends on them: where they can't be written or read, the video begins anew.
"""

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock, Timeout

from wan_tpu.aot.key import source_digest
from wan_tpu.data import Conditioning, DenoiseState, load_value, save_value
from wan_tpu.errors import InvalidInput, OutputError, UnhealthyResult
from wan_tpu.identity import digest_states
from wan_tpu.pipeline import Pipeline
from wan_tpu.progress import say
from wan_tpu.request import ResolvedRequest
from wan_tpu.stages import LocalExecutor, to_host
from wan_tpu.storage.folder import cache_folder
from wan_tpu.switches import read_switches

EVERY_S = 10.0  # A kill costs at most this much work, and what one file takes to be written.
_MOST = 8  # Unfinished videos that are kept: the newest.
_CONDITIONING, _STATE = "conditioning.safetensors", "state.safetensors"

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Kept:
    """What the files hold.

    Attributes:
        conditioning: The encoder's result, if any.
        state: The newest state, if any.
        warnings: The encoder's warnings.
    """

    conditioning: Conditioning | None = None
    state: DenoiseState | None = None
    warnings: tuple[str, ...] = ()

    def describe(self, steps: int) -> str:
        """Return what is done, for people; empty if nothing is.

        Args:
            steps: The request's steps.
        """
        if self.state is None:
            return "" if self.conditioning is None else "prompts and images are encoded"
        return f"{self.state.step} of {steps} steps are done"


class Unfinished:
    """The files of one unfinished video.

    Attributes:
        kept: What the files hold; at first, what an earlier run has left.
    """

    def __init__(self, folder: Path | None) -> None:
        """Read what an earlier run has left; without a folder nothing is kept."""
        self._folder = folder
        self._begun_s = self._kept_s = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unfinished")
        self._work: Future[None] | None = None
        self._is_broken = False
        self.kept = Kept() if folder is None else _read(folder)

    def offer(self, run: LocalExecutor, warnings: list[str]) -> None:
        """Keep what a run has computed, in the background, if the last time is long enough ago.

        Args:
            run: The run, whose encodings are done.
            warnings: Its warnings so far.
        """
        state, now = run.resumable, time.monotonic()
        if state is None:
            is_new = self.kept.conditioning is None
        else:
            # Between the last step and `Finish`, the latents aren't those that the decoder takes.
            is_useful = state.step < run.plan.steps or run.machine.is_finished
            is_new = is_useful and (self.kept.state is None or self.kept.state.step < state.step)
        is_busy = self._work is not None and not self._work.done()
        since = self._begun_s if run.machine.is_finished else self._kept_s
        if self._folder is None or self._is_broken or not is_new or now - since < EVERY_S:
            return
        if is_busy and not run.machine.is_finished:
            return
        self._kept_s = now
        self._work = self._thread.submit(self._keep, self._folder, run.conditioning, state, tuple(warnings))

    def close(self, *, forget: bool) -> None:
        """Wait for what is being written; with `forget`, remove the files."""
        self._thread.shutdown(wait=True)
        if forget and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _keep(
        self, folder: Path, conditioning: Conditioning, state: DenoiseState | None, warnings: tuple[str, ...]
    ) -> None:
        try:
            if self.kept.conditioning is None:
                save_value(conditioning, folder / _CONDITIONING, {"warnings": warnings})
                self.kept = dataclasses.replace(self.kept, conditioning=conditioning, warnings=warnings)
            if state is not None:
                state = to_host(state)
                save_value(state, folder / _STATE)
                self.kept = dataclasses.replace(self.kept, state=state)
        except OutputError as error:
            log.warning("a kill would cost all work so far: %s", error)
        except Exception:
            self._is_broken = True
            log.exception("a kill will cost all work that isn't kept yet, because of a defect")


@contextlib.contextmanager
def keeping_unfinished(pipe: Pipeline, request: ResolvedRequest) -> Iterator[Unfinished]:
    """Yield the files of a video for a block that makes it. Its end removes them, and so does a sick result."""
    with contextlib.ExitStack() as opened:
        unfinished = Unfinished(_open(_folder_of(pipe, request), opened))
        is_useless = False
        try:
            yield unfinished
            is_useless = True
        except UnhealthyResult:  # Its state may be sick, too.
            is_useless = True
            raise
        except KeyboardInterrupt:
            if done := unfinished.kept.describe(request.steps):
                say(f"{done}; the same command goes on from there")
            raise
        finally:
            unfinished.close(forget=is_useless)


def _folder_of(pipe: Pipeline, request: ResolvedRequest) -> Path:
    checkpoint = pipe.runtime.model.checkpoint
    assert checkpoint is not None
    components = pipe.runtime.model.components
    folders = {components[name].folder for name in pipe.runtime.model.spec.list_components(request)}
    weights = {folder: sorted(file.version for file in checkpoint.weights(folder).values()) for folder in folders}
    # Code and switches, too, are changed to find or mend what is wrong: a state from before would hide it.
    deciding = checkpoint.source, weights, pipe.runtime.dtype, read_switches(), source_digest()
    model = json.dumps(deciding, sort_keys=True)
    return cache_folder() / "unfinished" / digest_states(request, model)[:32]


def _open(folder: Path, opened: contextlib.ExitStack) -> Path | None:
    """Make and lock a folder until the stack closes; None if that isn't possible, or another process has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.utime(folder)
        newest = sorted(folder.parent.iterdir(), key=lambda other: other.stat().st_mtime, reverse=True)
        for older in newest[_MOST:]:
            with contextlib.suppress(OSError), FileLock(older / "lock", blocking=False):  # Unless its process runs.
                shutil.rmtree(older, ignore_errors=True)
        opened.enter_context(FileLock(folder / "lock", blocking=False))
    except (OSError, NotImplementedError, Timeout) as error:
        log.warning("a kill will cost all work, because unfinished videos can't be kept (%s)", error)
        return None
    return folder


def _read(folder: Path) -> Kept:
    """Return what is in a folder; damaged files count as missing."""
    conditioning = state = None
    warnings: tuple[str, ...] = ()
    with contextlib.suppress(InvalidInput):
        conditioning, notes = load_value(Conditioning, folder / _CONDITIONING)
        warnings = tuple(notes["warnings"])
    with contextlib.suppress(InvalidInput):
        state, _ = load_value(DenoiseState, folder / _STATE)
    return Kept(conditioning, state, warnings)
