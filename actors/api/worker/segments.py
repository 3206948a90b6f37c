"""Rebuild a job's request from what is stored: the request of its next segment, if it has several."""

import asyncio
import dataclasses
import io
import threading
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from actors.api.catalogue import Catalogue
from actors.api.segments import continue_request
from actors.api.worker.previews import BrokenVideo
from actors.errors import PipelineError
from actors.jobs.stored_request import BESIDE, count_segments
from actors.jobs.tables import Job
from wan_tpu.errors import InvalidRequest
from wan_tpu.media.joining import join_videos
from wan_tpu.media.video_content import VideoContent
from wan_tpu.request import FIELDS, GenerationRequest
from wan_tpu.spec import ModelSpec
from wan_tpu.storage.base import Storage


def is_last(job: Job) -> bool:
    """Return whether a job's next segment is its last one."""
    return len(job.segments) + 1 == count_segments(job.request)


def hides_first_frame(job: Job, spec: ModelSpec) -> bool:
    """Return whether the first frame of the next segment is the last one of the video so far, and isn't shown again."""
    if job.segments:
        return not spec.continues_video
    return "source_frames" in job.request and job.input_image is not None


def rebuild_request(job: Job, storage: Storage, catalogue: Catalogue, spec: ModelSpec) -> GenerationRequest:
    """Return the request of a job's next segment; a model that sees motion still needs the video so far.

    Raises:
        PipelineError: A later version accepted the job, with new fields.
        Missing: A file of the job isn't in storage any more.
        StorageError: Storage is unavailable.
    """
    fields = {name: value for name, value in job.request.items() if name not in BESIDE}
    if unknown := _list_unknown(job):
        raise PipelineError(
            f"it was accepted by a later version, with {', '.join(unknown)}; a worker of that version will run it"
        )
    fields["loras"] = catalogue.resolve(fields.get("loras", ()))
    index = len(job.segments)
    if index > 0:
        request = continue_request(GenerationRequest(**fields), job.request["next_prompts"][index - 1], index)
        image = None if job.segments_end is None else _read_picture(storage, job.segments_end)
        return dataclasses.replace(request, image=image)
    for field, name in (("image", job.input_image), ("last_image", job.input_last_image)):
        fields[field] = None if name is None else _read_picture(storage, name)
    if job.input_video is not None:
        if hides_first_frame(job, spec):
            storage.size(job.input_video)  # The video is read only at the end; if it is gone, computing is of no use.
        else:
            fields["video"] = VideoContent(storage.read(job.input_video))
    return GenerationRequest(**fields)


def can_read(job: Job) -> bool:
    """Return whether this version understands all of a job's request; a later version may have accepted it."""
    return not _list_unknown(job)


def list_parts(job: Job) -> list[str]:
    """Return the names in storage of the video's finished parts, in order: what it continues, and its segments."""
    source = [job.input_video] if "source_frames" in job.request and job.input_video is not None else []
    return [*source, *job.segments, *([job.made["video"]] if job.made is not None else [])]


async def join_parts(parts: Sequence[Path], output: Path) -> None:
    """Write a video's parts as one mp4. When cancelled, it leaves no process behind.

    Raises:
        BrokenVideo: One of them can't be read.
        OutputError: The disk can't hold it.
        Unavailable: The machine fails.
    """
    cancelled = threading.Event()
    try:
        await asyncio.to_thread(join_videos, parts, output, cancelled=cancelled)
    except InvalidRequest as error:  # It is about a client's file, and these are the engine's.
        raise BrokenVideo("a part of it can't be decoded, so it can't be joined with the others") from error
    finally:
        cancelled.set()


def _list_unknown(job: Job) -> set[str]:
    return job.request.keys() - FIELDS - set(BESIDE)


def _read_picture(storage: Storage, name: str) -> Image.Image:
    return Image.open(io.BytesIO(storage.read(name))).convert("RGB")
