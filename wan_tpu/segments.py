"""Requests of segments: a video goes on with another prompt, from its last frame or from its end. Imports no JAX."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from wan_tpu.errors import InvalidRequest
from wan_tpu.model_limits import FULL_STRENGTH
from wan_tpu.reference import ENDS, TAIL, Reference, find_soundtrack, parse_references
from wan_tpu.request import IMAGES, GenerationRequest, ResolvedRequest
from wan_tpu.spec import ModelSpec

# What a segment takes from the one before: its last frame, or its end with motion and sound (`wan_tpu.tail.Tail`).
FRAME, MOTION = WAYS = "frame", "motion"
_SEEDS = 2**63


def continue_request(first: GenerationRequest, prompt: str, index: int, *, motion: bool = False) -> GenerationRequest:
    """Return the request of a later segment, except for what it continues: an image, a video, or a video's end.

    Args:
        index: The segment's number, counted from 0. Each segment has another seed, so that motion doesn't repeat.
        motion: Whether it begins with the end of a video, beside which it keeps the references that the first segment
            doesn't begin with.
    """
    inputs: dict[str, Any] = dict.fromkeys(("image", "last_image", "video", "strength"))
    kept = [one for one in parse_references(first.references or ()) or () if motion and one.kind not in ENDS]
    inputs |= {"references": tuple(kept)} if kept else {"references": None, "reference_size": None}
    return dataclasses.replace(first, prompt=prompt, seed=(first.seed + index) % _SEEDS, **inputs)


def choose_motion(spec: ModelSpec, first: ResolvedRequest, wanted: str | None, kind: str = TAIL) -> bool:
    """Return whether later segments begin with the end of the one before: by default, where the model can do that.

    Args:
        first: The first segment's request.
        wanted: `MOTION`, `FRAME` or None.
        kind: What they begin with, `TAIL` or `CONTINUED`.

    Raises:
        InvalidRequest: The model, or the request's preset, can't do what is wanted; the first has a soundtrack.
    """
    check_soundtrack(find_soundtrack(first.references) is not None)
    if spec.overlap is None or spec.continues_video:
        able = MOTION if spec.continues_video else FRAME  # The first of them sees all that came before.
        if wanted not in (None, able):
            raise InvalidRequest(
                f"continue_by is {wanted}, but {spec.name} continues videos by {able} only; leave it out", "continue_by"
            )
        return False
    if wanted == FRAME:
        return False
    try:
        check_segment(spec, continue_request(first, first.prompt, 1, motion=True), motion=True, kinds=(kind,))
    except InvalidRequest as error:
        if wanted is None:
            return False
        raise InvalidRequest(f"continue_by is {MOTION}: {error}", "continue_by") from None
    return True


def check_soundtrack(follows: bool) -> None:
    """Raise `InvalidRequest` if the first of several segments follows a soundtrack."""
    if follows:
        raise InvalidRequest(
            "the video follows a sound, which each segment would begin anew; leave it or next_prompts out",
            "next_prompts",
        )


def check_segment(
    spec: ModelSpec, request: GenerationRequest, *, motion: bool = False, kinds: Sequence[str] = (TAIL,)
) -> None:
    """Raise `InvalidRequest` if a model can't make a later segment, whose request lacks what it continues.

    Args:
        kinds: With `motion`, the ends of other segments that it begins or ends with, such as `TAIL`.
    """
    if motion:
        if spec.overlap is None:
            raise InvalidRequest(
                f"{spec.name} can't continue a video by {MOTION} with the stages it has here; make the video anew with "
                f"continue_by {FRAME}",
                "continue_by",
            )
        assert isinstance(request, ResolvedRequest)
        references = parse_references(request.references or ()) or ()
        kept = [reference for reference in references if reference.kind not in ENDS]
        frames, rate = spec.overlap.frames, (spec.audio_rate or 0) * spec.has_sound(request)
        measures = request.height, request.width, frames, round(frames / request.fps * rate), rate
        ends = (Reference(kind, None, *measures) for kind in kinds)
        spec.plan(dataclasses.replace(request, references=(*kept, *ends), max_seconds=None))
        return
    if spec.continues_video:
        spec.plan(dataclasses.replace(request, strength=FULL_STRENGTH), video=True)
        return
    try:
        spec.plan(request, image=True)
    except InvalidRequest as error:
        if error.field not in IMAGES:
            raise
        # The client hasn't sent the image that the message would be about.
        message = f"each segment after the first begins with an image, the last frame before it: {error}"
        raise InvalidRequest(message, "next_prompts") from None


def check_segments(spec: ModelSpec, first: ResolvedRequest, prompts: Sequence[str], wanted: str | None) -> bool:
    """Return what `choose_motion` does; raises `InvalidRequest` if a model can't make a segment for each prompt."""
    motion = choose_motion(spec, first, wanted)
    if not motion:
        spec.check_extension(first)
    for index, prompt in enumerate(prompts, 1):
        try:
            check_segment(spec, continue_request(first, prompt, index, motion=motion), motion=motion)
        except InvalidRequest as error:
            if error.field != "prompt":
                raise
            raise InvalidRequest(f"next_prompts, number {index}: {error}", "next_prompts") from None
    return motion


def count_shared(spec: ModelSpec, *, motion: bool) -> int:
    """Return how many frames a later segment shares with the one before."""
    if motion:
        assert spec.overlap is not None
        return spec.overlap.frames
    return 0 if spec.continues_video else 1
