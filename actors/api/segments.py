"""The requests of a job's segments. Each segment after the first continues the video so far, with its own prompt."""

from typing import Any

from actors.api.catalogue import Catalogue
from actors.errors import PipelineError
from actors.jobs.stored_request import JOB_FIELDS, Redo, count_segments, read_redo
from actors.jobs.tables import Job
from wan_tpu.errors import InvalidRequest
from wan_tpu.reference import GOAL, TAIL, restore_references
from wan_tpu.request import FIELDS, GenerationRequest, ResolvedRequest
from wan_tpu.segments import MOTION, check_segment, continue_request
from wan_tpu.spec import ModelSpec


def read_request(job: Job, catalogue: Catalogue) -> GenerationRequest:
    """Return the request of a job's first segment, without its images and its video.

    Raises:
        PipelineError: A later version accepted the job, with new fields.
        InvalidRequest: The service doesn't offer an adapter any more.
    """
    fields = {name: value for name, value in job.request.items() if name not in JOB_FIELDS}
    if fields.get("max_seconds") is not None:  # The model chooses the length.
        del fields["frames"]
    if unknown := _list_unknown(job):
        raise PipelineError(
            f"it was accepted by a later version, with {', '.join(unknown)}; a worker of that version will run it"
        )
    return GenerationRequest(**restore_references(fields) | {"loras": catalogue.resolve(fields.get("loras", ()))})


def can_read(job: Job) -> bool:
    """Return whether this version understands all of a job's request; a later version may have accepted it."""
    fields = {name: value for name, value in job.request.items() if name not in (*JOB_FIELDS, "loras")}
    if _list_unknown(job):
        return False
    try:
        GenerationRequest(**restore_references(fields))
    except InvalidRequest:  # A later version takes more values.
        return False
    return True


def _list_unknown(job: Job) -> set[str]:
    return job.request.keys() - FIELDS - set(JOB_FIELDS)


def continues_motion(job: Job) -> bool:
    """Return whether each of a job's later segments begins with the end of the one before, not with its last frame."""
    return bool(job.request.get("continue_by") == MOTION)


def hides_first_frame(job: Job, spec: ModelSpec) -> bool:
    """Return whether the first frame of the next segment is the last one of the video so far, and isn't shown again."""
    if job.segments:
        return not spec.continues_video and not continues_motion(job)
    return "source_frames" in job.request and job.input_image is not None


def check_motion(job: Job, spec: ModelSpec, first: ResolvedRequest) -> None:
    """Raise `InvalidRequest` if a job continues motion and the model can't, as on other stages than its first one's.

    Args:
        job: The job.
        spec: The model.
        first: The request of one of its segments.
    """
    if continues_motion(job):
        kinds, redo = [TAIL], read_redo(job.request)
        if redo is not None:
            goes_on = redo.begins_with is not None or job.input_video is not None  # From a segment, or from a video.
            kinds = [TAIL] * goes_on + [GOAL] * (redo.ends_with is not None)
        try:
            check_segment(spec, continue_request(first, first.prompt, 1, motion=True), motion=True, kinds=kinds)
        except InvalidRequest as error:
            if len(kinds) < 2 or error.field != "frames":
                raise
            raise InvalidRequest(
                f"a segment has {first.frames} frames, too few to be made again between two others; "
                "remix the video instead",
                "segment",
            ) from None


def list_segments(job: Job) -> tuple[list[str], list[str]]:
    """Return the names in storage of a finished job's segments, and of the ends of all but the last; [] if not kept."""
    count, redo = count_segments(job.request), read_redo(job.request)
    numbers = range(1, count + 1)
    taken = (None,) * count if redo is None else redo.parts
    parts = [job.results.get(f"part-{n}", name) for n, name in zip(numbers, taken, strict=True)]
    ends = [job.results.get(f"end-{n}") for n in numbers[:-1]] if redo is None else [*redo.ends]
    return ([], []) if None in (*parts, *ends) or count == 1 else (parts, ends)  # type: ignore[return-value]


def find_end(job: Job) -> str | None:
    """Return the name in storage of the end of a finished job's video, if it is kept."""
    redo = read_redo(job.request)
    return job.results.get("end", None if redo is None else redo.end)


def make_segment_again(source: Job, number: int, prompt: str, seed: int) -> dict[str, Any]:
    """Return the request of a job that makes one segment of another job again, and shares the others with it.

    Args:
        source: The job, which has completed.
        number: The segment's number, counted from 1.
        prompt: Its new prompt.
        seed: Its new seed.

    Raises:
        InvalidRequest: There is no such segment, or the segments weren't kept.
    """
    (parts, ends), count = list_segments(source), count_segments(source.request)
    if not parts:
        why = "it has only one" if count == 1 else "only those of videos with continue_by motion are kept"
        raise InvalidRequest(f"no segment of {source.id} can be made again, because {why}; remix it instead", "segment")
    if not 1 <= number <= count:
        raise InvalidRequest(f"segment is {number}; {source.id} has {count}: give 1 to {count}", "segment")
    if number == 1 and (source.input_image or source.input_last_image):
        raise InvalidRequest(
            "segment 1 begins with an image, which can't be made to meet the second one; remix the video, or make "
            "another segment again",
            "segment",
        )
    kept = tuple(None if index == number else part for index, part in enumerate(parts, 1))
    end = find_end(source) if number < count else None
    request = source.request | {"redo": Redo(number, seed, kept, tuple(ends), end).to_stored()}
    if number == 1:
        return request | {"prompt": prompt}
    prompts = list(source.request["next_prompts"])
    prompts[number - 2] = prompt
    return request | {"next_prompts": prompts}
