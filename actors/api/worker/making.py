"""Make the video of a claimed job. Whatever has been computed is stored before anything else can fail."""

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from actors.api.segments import check_motion, continues_motion, hides_first_frame
from actors.api.variants import VARIANTS
from actors.api.worker.context import WorkerContext
from actors.api.worker.fragments import Fragments
from actors.api.worker.job_files import JobFiles
from actors.api.worker.progress import Tracker
from actors.api.worker.segments import is_last, join_parts, list_parts, measure_inputs, rebuild_request, shows_end
from actors.api.worker.thumbnails import encode_last_frame, make_thumbnails, read_last_frame
from actors.api.worker.unfinished import UnfinishedPictures
from actors.engine import GeneratedVideo, OnEvent
from actors.errors import PipelineError
from actors.jobs.stored_request import count_frames, count_segments, read_redo
from actors.jobs.tables import Job
from actors.observe.logs import log_event
from actors.retrying import retry
from wan_tpu.errors import OutputError, Unavailable
from wan_tpu.media.video_content import VideoContent

log = logging.getLogger(__name__)

T = TypeVar("T")
# Pauses between attempts at what is left to do with a finished video, which another machine may do if this one can't.
_JOIN_PAUSES_S = (1.0, 5.0, 15.0, 30.0)
_PICTURE_PAUSES_S = (1.0,)


@dataclasses.dataclass(frozen=True)
class JobResults:
    """The stored results of a job.

    Attributes:
        names: The names of the results in storage, by variant.
        watchable: Whether all fragments of the video are stored as well.
        unwritten: Names of other files that may still be written.
    """

    names: dict[str, str]
    watchable: bool
    unwritten: tuple[str, ...]


class VideoMaker:
    """Makes what is left of a job's video."""

    def __init__(
        self, context: WorkerContext, job: Job, files: JobFiles, fragments: Fragments, tracker: Tracker, note: OnEvent
    ) -> None:
        """Set up without doing anything.

        Args:
            tracker: Told where segments begin and end.
            note: Called with the slices' spans.
        """
        self._context, self._job, self._files, self._fragments = context, job, files, fragments
        self._tracker, self._note, self._queue = tracker, note, context.queue
        self._unfinished = UnfinishedPictures(context, job)

    async def run(self) -> JobResults | None:
        """Make and store the results; return None if the job was given back because another one's turn has come."""
        async with self._files.open(), self._fragments.storing(), self._unfinished.storing():
            await self._take_segments()
            while self._job.last_segment is None:
                await self._make_segment()
                await self._take_segments()
                if self._job.last_segment is None:
                    self._context.settings.limits.check_disk(self._context.storage)
                    if await self._files.insist(self._queue.give_way, self._job):
                        return None
            names = await self._make_results()
            watchable = await self._fragments.finish()
            return JobResults(names, watchable, tuple(self._fragments.unwritten | self._unfinished.unwritten))

    async def _take_segments(self) -> None:
        """Take the segments that come next from the job of which this one makes another segment again."""
        job, redo = self._job, read_redo(self._job.request)
        while redo is not None and job.last_segment is None and (name := redo.parts[len(job.segments)]) is not None:
            if is_last(job):
                await self._files.insist(self._queue.keep_last_segment, job, {"video": name})
            else:
                await self._files.insist(self._queue.keep_segment, job, len(job.segments), name, None)
            self._fragments.end_segment(name)

    async def _make_segment(self) -> None:
        """Make and store the job's next segment; most jobs have one."""
        job, engine = self._job, self._context.engine
        seen: Path | None = None
        if job.segments and engine.model.continues_video:  # It sees all that came before.
            seen = await self._join()
        elif job.segments and job.segments_end is None and not continues_motion(job):
            await self._store_end()
        size = await self._files.read(measure_inputs, job, self._context.storage, engine.model)
        async with self._context.held.reserve(size + (seen.stat().st_size if seen else 0)):
            # A video of any length, of which the end is read.
            source = await self._files.fetch(job.input_video) if job.input_video and shows_end(job) else None
            request = await self._files.read(
                rebuild_request, job, self._context.storage, self._context.settings.catalogue, engine.model, source
            )
            if seen:
                content = await asyncio.to_thread(seen.read_bytes)
                request = dataclasses.replace(request, video=VideoContent(content))
            plan = engine.model.plan(request)  # Jobs outlive upgrades, and adapters may have moved, so none is stored.
            check_motion(job, engine.model, plan.request)
            self._tracker.begin_segment(engine.model, plan)
            plan = plan.with_request(
                dataclasses.replace(plan.request, **self._choose_frames(plan.request.hidden_frames))
            )
            video = await engine.generate(
                plan,
                id=job.id,
                on_event=self._note,
                priority=job.priority,
                on_fragment=self._fragments.add,
                on_preview=self._unfinished.add if self._context.pictures else None,
            )
        with self._context.held.hold(len(video.mp4) + len(video.tail or b"")):
            await self._keep(video)

    def _choose_frames(self, shared: int) -> dict[str, Any]:
        """Return which frames of the next segment are written, and whether its end is kept.

        Args:
            shared: How many frames at its beginning are those of the end that it continues.
        """
        job, spec = self._job, self._context.engine.model
        hidden = shared or int(hides_first_frame(job, spec))
        if spec.overlap is None:
            return {"hidden_frames": hidden}
        if not continues_motion(job):
            return {"hidden_frames": hidden, "keeps_tail": is_last(job)}
        # Each segment has as many frames, of which it shares some with the one before.
        frames, added = job.request["frames"], job.request["added_frames"]
        origin = count_frames(job.request) - frames - (count_segments(job.request) - 1 - len(job.segments)) * added
        frames = {"hidden_frames": hidden, "origin": origin}
        if is_last(job):
            return {**frames, "keeps_tail": True}
        return {**frames, "blended_frames": spec.overlap.blended, "keeps_tail": read_redo(job.request) is None}

    async def _keep(self, video: GeneratedVideo) -> None:
        """Store a segment, and record that it is."""
        job, index, last = self._job, len(self._job.segments), is_last(self._job)
        part = None if count_segments(job.request) == 1 else f"segment-{index + 1}"
        contents: dict[str, tuple[str, Path | bytes]] = {"video": ("mp4", video.mp4)}
        needs_end = self._shows_final_frame if last else not self._context.engine.model.continues_video
        motion = continues_motion(job)
        if video.tail is not None:
            contents["end"] = ("safetensors", video.tail)
        elif not last and motion and read_redo(job.request) is None:
            await self._context.engine.forget(job.id)  # A snapshot of an earlier version would lack the end again.
            raise PipelineError("the pipeline has kept no end of a segment for the next one")
        if needs_end and (last or not motion) and video.last_frame is not None:
            contents["final_frame"] = ("png", await asyncio.to_thread(encode_last_frame, video.last_frame))
        names = await self._files.write(contents, part)
        self._tracker.end_segment()
        self._job.progress = self._tracker.estimate()
        warnings = self._context.settings.catalogue.name_files(video.warnings)
        if last:
            frames = video.frames if job.request.get("max_seconds") is not None else None
            await self._files.insist(self._queue.keep_last_segment, job, names, warnings, frames)
        else:
            end = names.get("end", names.get("final_frame"))
            results = {f"end-{index + 1}": names["end"]} if "end" in names else {}
            await self._files.insist(self._queue.keep_segment, job, index, names["video"], end, warnings, results)
        self._fragments.end_segment(names["video"])
        await self._context.engine.forget(job.id)  # Its snapshots are of no more use.

    async def _store_end(self) -> None:
        """Store the last frame of the newest segment, which the next one begins with."""
        job, index = self._job, len(self._job.segments) - 1
        is_first = index == 0 and "source_frames" not in job.request
        frames = job.request["frames" if is_first else "added_frames"]
        video = await self._files.fetch(job.segments[index])
        png = await self._repeat(_PICTURE_PAUSES_S, asyncio.to_thread, read_last_frame, video, frames)
        [name] = (await self._files.write({"end": ("png", png)}, f"segment-{index + 1}")).values()
        await self._files.insist(self._queue.keep_end, job, name)

    async def _join(self) -> Path:
        """Return the video's finished parts as one file."""
        paths = [await self._files.fetch(name) for name in list_parts(self._job)]
        joined = self._files.get_path("joined.mp4")
        await self._repeat(_JOIN_PAUSES_S, join_parts, paths, joined)
        return joined

    async def _make_results(self) -> dict[str, str]:
        """Join the parts, and make the thumbnail and the sheet; return the results' names in storage, by variant."""
        assert self._job.last_segment is not None
        results = dict(self._job.last_segment)
        if continues_motion(self._job) and count_segments(self._job.request) > 1:
            results |= self._list_segments()
        if len(list_parts(self._job)) > 1:
            results |= await self._files.write({"video": (VARIANTS["video"][1], await self._join())})
        if self._context.pictures:
            results |= await self._make_thumbnails(results)
        return results

    def _list_segments(self) -> dict[str, str]:
        """Return the segments that this job has made, and their ends: one of them may be made again later."""
        job = self._job
        assert job.last_segment is not None
        parts = {f"part-{index}": name for index, name in enumerate([*job.segments, job.last_segment["video"]], 1)}
        if (redo := read_redo(job.request)) is not None:
            own = f"part-{redo.segment}"
            return {own: parts[own]}
        return parts | {variant: name for variant, name in job.results.items() if variant.startswith("end-")}

    async def _make_thumbnails(self, results: dict[str, str]) -> dict[str, str]:
        """Store thumbnail, sheet and last frame; a video is complete without those that this machine can't make."""
        request = self._job.request
        height, width, frames = int(request["height"]), int(request["width"]), count_frames(request)
        contents: dict[str, bytes] = {}
        try:
            video = await self._files.fetch(results["video"])
            make = functools.partial(make_thumbnails, video, height=height, width=width, frames=frames)
            contents |= await self._repeat(_PICTURE_PAUSES_S, asyncio.to_thread, make)
            if self._shows_final_frame and "final_frame" not in results:
                read = functools.partial(read_last_frame, video, frames)
                contents["final_frame"] = await self._repeat(_PICTURE_PAUSES_S, asyncio.to_thread, read)
        except Unavailable as error:
            log_event(log, "no thumbnails", logging.WARNING, job=self._job.id, reason=str(error))
        return await self._files.write({key: (VARIANTS[key][1], value) for key, value in contents.items()})

    @property
    def _shows_final_frame(self) -> bool:
        """Whether the results include the last frame; models without images can't continue a video from it."""
        return self._context.pictures and "i2v" in self._context.engine.model.tasks

    async def _repeat(self, pauses_s: tuple[float, ...], work: Callable[..., Awaitable[T]], *args: object) -> T:
        """Do something with finished files, again after each pause if this machine fails."""

        async def note(error: Exception, _pause_s: float) -> None:
            log_event(log, "done again", logging.WARNING, job=self._job.id, reason=str(error))

        return await retry(functools.partial(work, *args), (Unavailable, OutputError), pauses_s, note)
