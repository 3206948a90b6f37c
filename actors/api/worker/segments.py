"""Rebuild a job's request from what is stored: the request of its next segment, if it has several."""

import dataclasses
import io
from collections.abc import Sequence

from PIL import Image

from actors.api.catalogue import Catalogue
from actors.api.segments import continue_request
from actors.api.worker.previews import BrokenVideo
from actors.errors import PipelineError
from actors.jobs.stored_request import BESIDE, count_segments
from actors.jobs.tables import Job
from wan_tpu.errors import InvalidRequest
from wan_tpu.media.joining import join_contents
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
    if unknown := fields.keys() - FIELDS:
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


def read_parts(job: Job, storage: Storage) -> list[bytes]:
    """Return the mp4 files that a job's next segment continues, in order; raises `Missing`, `StorageError`."""
    return [storage.read(name) for name in _list_parts(job)]


def measure_parts(job: Job, storage: Storage) -> int:
    """Return how many bytes these files have in total; raises `Missing`, `StorageError`."""
    return sum(map(storage.size, _list_parts(job)))


async def join_parts(parts: Sequence[bytes]) -> bytes:
    """Return a video's parts as one mp4; raises `BrokenVideo` if one of them can't be read."""
    try:
        return await join_contents(parts)
    except InvalidRequest as error:  # It is about a client's file, and these are the engine's.
        raise BrokenVideo("a part of it can't be decoded, so it can't be joined with the others") from error


def _list_parts(job: Job) -> list[str]:
    source = [job.input_video] if "source_frames" in job.request and job.input_video is not None else []
    return [*source, *job.segments]


def _read_picture(storage: Storage, name: str) -> Image.Image:
    return Image.open(io.BytesIO(storage.read(name))).convert("RGB")
