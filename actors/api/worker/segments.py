"""Rebuild a job's request from what is stored: the request of its next segment, if it has several."""

import asyncio
import contextlib
import dataclasses
import io
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from actors.api.catalogue import Catalogue
from actors.api.segments import continues_motion, hides_first_frame, read_request
from actors.api.worker.failures import InputGone
from actors.api.worker.thumbnails import BrokenVideo
from actors.jobs.stored_request import count_segments, read_redo
from actors.jobs.tables import Job
from wan_tpu.errors import InvalidRequest
from wan_tpu.media.joining import join_videos
from wan_tpu.media.video_content import VideoContent
from wan_tpu.reference import (
    CONTINUED,
    ENDING,
    GOAL,
    SOUNDTRACK,
    Reference,
    open_reference,
    parse_reference,
    parse_references,
    restore_references,
)
from wan_tpu.request import GenerationRequest
from wan_tpu.segments import continue_request
from wan_tpu.spec import ModelSpec
from wan_tpu.storage.base import Storage
from wan_tpu.tail import Tail, parse_tail

_SAMPLE_BYTES = 8  # Of a sound in memory: float32, two channels.


def is_last(job: Job) -> bool:
    """Return whether a job's next segment is its last one."""
    return len(job.segments) + 1 == count_segments(job.request)


def shows_end(job: Job) -> bool:
    """Return whether the next segment goes on from the end of a video that is known from its file alone."""
    return (
        not job.segments
        and continues_motion(job)
        and job.input_video is not None
        and job.input_image is None
        and "end_file" not in job.request
    )


def measure_inputs(job: Job, storage: Storage, spec: ModelSpec) -> int:
    """Return how many bytes of files, or a few more, the request of a job's next segment holds.

    Not counted are single pictures that it begins or ends with, and what a model sees of the segments before.

    Raises:
        Missing: A file of the job isn't in storage any more.
        StorageError: Storage is unavailable.
    """
    request, redo, size = job.request, read_redo(job.request), 0
    ends = [job.segments_end] if redo is None else [redo.begins_with, redo.ends_with]
    names = [*ends] if continues_motion(job) else []
    if not job.segments:
        names.append(request.get("end_file"))
        if shows_end(job):
            size += 3 * ENDING * request["height"] * request["width"]
        elif "end_file" not in request and not hides_first_frame(job, spec):
            names.append(job.input_video)
    if not job.segments or continues_motion(job):
        names += request.get("reference_files", ())
        for reference in restore_references(request).get("references") or ():
            size += 3 * reference.height * reference.width * (reference.kind == "image")
            size += _SAMPLE_BYTES * reference.samples * (reference.kind == SOUNDTRACK)
    return size + sum(storage.size(name) for name in names if name is not None)


def rebuild_request(
    job: Job, storage: Storage, catalogue: Catalogue, spec: ModelSpec, source: Path | None = None
) -> GenerationRequest:
    """Return the request of a job's next segment; a model that sees all that came before still needs the video so far.

    Args:
        job: The job.
        storage: Where its files are.
        catalogue: The service's adapters and presets.
        spec: The model.
        source: Where the video that it continues is on this machine, if it `shows_end`.

    Raises:
        PipelineError, InvalidRequest: As `read_request`.
        BrokenVideo: The end of a segment is damaged.
        InputGone: The end of the segment before isn't stored any more.
        Missing: A file of the job isn't in storage any more.
        StorageError: Storage is unavailable.
    """
    request, index, redo = read_request(job, catalogue), len(job.segments), read_redo(job.request)
    for name in () if redo is None else redo.files:
        storage.size(name)  # They are read only at the end; if one is gone, computing is of no use.
    if index > 0:
        prompt, motion = job.request["next_prompts"][index - 1], continues_motion(job)
        request = continue_request(request, prompt, index, motion=motion)
        if motion:
            if (end := redo.begins_with if redo else job.segments_end) is None:
                raise InputGone
            ends = [parse_reference(_read_tail(storage, end)), *_read_goal(job, storage)]
            references = [*_read_references(job, request, storage), *ends]
            return dataclasses.replace(request, references=references, seed=redo.seed if redo else request.seed)
        image = None if job.segments_end is None else _read_picture(storage, job.segments_end)
        return dataclasses.replace(request, image=image)
    names = {"image": job.input_image, "last_image": job.input_last_image}
    inputs: dict[str, Any] = {field: _read_picture(storage, name) for field, name in names.items() if name is not None}
    if job.input_video is not None:
        if source is not None:
            inputs["references"] = [_read_shown_end(source)]
        elif (end_name := job.request.get("end_file")) is not None:
            # All of its frames are shown, so that none is left to be blended with others.
            inputs["references"] = [parse_reference(dataclasses.replace(_read_tail(storage, end_name), blended=0))]
        elif hides_first_frame(job, spec):
            storage.size(job.input_video)  # The video is read only at the end; if it is gone, computing is of no use.
        else:
            inputs["video"] = VideoContent(storage.read(job.input_video))
    if request.references is not None:
        inputs["references"] = _read_references(job, request, storage)
    if redo is not None:
        inputs |= {"references": [*inputs.get("references", ()), *_read_goal(job, storage)], "seed": redo.seed}
    return dataclasses.replace(request, **inputs)


def list_parts(job: Job) -> list[str]:
    """Return the names in storage of the video's finished parts, in order: what it continues, and its segments."""
    source = [job.input_video] if "source_frames" in job.request and job.input_video is not None else []
    return [*source, *job.segments, *([job.last_segment["video"]] if job.last_segment is not None else [])]


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


@contextlib.contextmanager
def _blame_file(name: str) -> Iterator[None]:
    """Raise `BrokenVideo` for what a client is told about its own file: this one is the service's."""
    try:
        yield
    except InvalidRequest as error:
        raise BrokenVideo(f"{name} is damaged in storage: {error}") from error


def _read_tail(storage: Storage, name: str) -> Tail:
    """Return the end of a segment."""
    content = storage.read(name)
    with _blame_file("the end of a segment that it continues"):
        return parse_tail(content, "its file")


def _read_shown_end(video: Path) -> Reference:
    """Return the end of a video as its file shows it."""
    with _blame_file("the video that it continues"):
        reference = open_reference(CONTINUED, video)
    assert isinstance(reference.source, Tail)  # Its place on this machine would tell apart what is the same.
    return dataclasses.replace(reference, source=dataclasses.replace(reference.source, path=None))


def _read_goal(job: Job, storage: Storage) -> list[Reference]:
    """Return the end that a segment must have, because a finished one begins with it."""
    redo = read_redo(job.request)
    if redo is None or redo.ends_with is None:
        return []
    return [dataclasses.replace(parse_reference(_read_tail(storage, redo.ends_with)), kind=GOAL)]


def _read_references(job: Job, request: GenerationRequest, storage: Storage) -> list[Reference]:
    """Return a job's references with the content of their files."""
    files = zip(job.request.get("reference_files", ()), parse_references(request.references or ()) or (), strict=True)
    return [_read_reference(storage, name, reference) for name, reference in files]


def _read_reference(storage: Storage, name: str, reference: Reference) -> Reference:
    """Return a reference with the content of its file, which this service has encoded."""
    if reference.kind == SOUNDTRACK:
        content = VideoContent(storage.read(name))
        with _blame_file("the sound that it follows"):
            return open_reference(SOUNDTRACK, content)
    is_image = reference.kind == "image"
    source = _read_picture(storage, name) if is_image else VideoContent(storage.read(name))
    return dataclasses.replace(reference, source=source)


def _read_picture(storage: Storage, name: str) -> Image.Image:
    return Image.open(io.BytesIO(storage.read(name))).convert("RGB")
