"""Make the video of a line, one segment after the other if it has several.

A line that is interrupted begins again, but each of its segments goes on from its own newest snapshot.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

from PIL import Image

from actors.batch.manifest import Entry, fix_length
from actors.engine import Engine, GeneratedVideo, OnEvent, OnPreview
from actors.errors import RequestFailed
from wan_tpu.media.joining import join_videos
from wan_tpu.media.reading import read_frame
from wan_tpu.media.temporary import open_folder
from wan_tpu.media.video_content import VideoContent
from wan_tpu.plan import RequestPlan
from wan_tpu.reference import parse_reference, parse_references
from wan_tpu.segments import check_segments, continue_request, count_shared
from wan_tpu.spec import ModelSpec
from wan_tpu.tail import parse_tail


async def make_line(entry: Entry, engine: Engine, on_event: OnEvent, on_preview: OnPreview | None) -> GeneratedVideo:
    """Return the video of a line; raises what planning and `Engine.generate` raise."""
    plan = await asyncio.to_thread(entry.load)

    async def generate(plan: RequestPlan, segment: int = 0) -> GeneratedVideo:
        return await engine.generate(plan, id=name_segment(entry, segment), on_event=on_event, on_preview=on_preview)

    if not entry.next_prompts:
        return await generate(plan)
    segments = await asyncio.to_thread(LineSegments, engine.model, plan, entry)
    with open_folder() as folder:
        return await segments.make(generate, folder)


def name_segment(entry: Entry, index: int) -> str:
    """Return the id of a segment's request. Those of later ones belong to this line alone, whatever its id."""
    return f"{entry.id}.{entry.digest[:16]}.{index}" if index else entry.id


class LineSegments:
    """The segments of a line."""

    def __init__(self, model: ModelSpec, first: RequestPlan, entry: Entry) -> None:
        """Check them, which takes a while; raises `InvalidRequest` if the model can't make one of them."""
        self._model, self._first, self._entry = model, fix_length(model, first), entry
        self._motion = check_segments(model, self._first.request, entry.next_prompts, entry.continue_by)
        self._shared = count_shared(model, motion=self._motion)

    async def make(
        self, generate: Callable[[RequestPlan, int], Awaitable[GeneratedVideo]], folder: Path
    ) -> GeneratedVideo:
        """Return all segments as one video; files are written to a folder."""
        parts: list[Path] = []
        warnings: dict[str, None] = {}
        video: GeneratedVideo | None = None
        for index in range(1 + len(self._entry.next_prompts)):
            plan = await asyncio.to_thread(self._plan, index, video, parts)
            video = await generate(plan, index)
            if plan.request.keeps_tail and video.tail is None:  # A final failure, after which no snapshot stays.
                raise RequestFailed(
                    "an earlier version's snapshot lacks the end of a segment; run the batch again", "error"
                )
            warnings |= dict.fromkeys(video.warnings)
            parts.append(folder / f"{index}.mp4")
            await asyncio.to_thread(parts[-1].write_bytes, video.mp4)
        mp4 = await asyncio.to_thread(_join, parts)
        return GeneratedVideo(mp4, tuple(warnings))

    def _plan(self, index: int, before: GeneratedVideo | None, parts: list[Path]) -> RequestPlan:
        """Return the plan of a segment, which begins with what the one before has left."""
        plan, hidden = self._first, 0
        if before is not None:
            prompt = self._entry.next_prompts[index - 1]
            request = continue_request(self._first.request, prompt, index, motion=self._motion)
            if self._motion:
                assert before.tail is not None
                references = parse_references(request.references or ()) or ()
                tail = parse_reference(parse_tail(before.tail, "a segment"))
                plan = self._model.plan(dataclasses.replace(request, references=(*references, tail)))
                hidden = plan.request.hidden_frames
            elif self._model.continues_video:
                seen = VideoContent(_join(parts))
                plan = self._model.plan(dataclasses.replace(request, video=seen))
            else:
                frame = before.last_frame
                written = self._first.request.frames - (index > 1)
                end = read_frame(VideoContent(before.mp4), written - 1) if frame is None else Image.fromarray(frame)
                plan, hidden = self._model.plan(dataclasses.replace(request, image=end)), self._shared
        is_last, overlap = index == len(self._entry.next_prompts), self._model.overlap
        blended = overlap.blended if self._motion and not is_last and overlap is not None else 0
        origin = index * (self._first.request.frames - self._shared)
        segment = dataclasses.replace(
            plan.request,
            hidden_frames=hidden,
            blended_frames=blended,
            origin=origin if self._motion else 0,
            keeps_tail=self._motion and not is_last,
        )
        return plan.with_request(segment)


def _join(parts: list[Path]) -> bytes:
    """Return the content of an mp4 that shows all parts."""
    if len(parts) == 1:
        return parts[0].read_bytes()
    joined = parts[0].with_name("joined.mp4")
    join_videos(parts, joined)
    return joined.read_bytes()
