"""Plan the video of a body, if it can be made: from its fields to the pipeline's request, and from that to its plan."""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from actors.api.catalogue import Catalogue
from actors.api.core.access import Caller
from actors.api.core.bodies import ParsedBody
from actors.api.core.create_video import NAMES, SETTINGS, CreateVideo
from actors.api.core.errors import HttpError
from actors.api.outbound.client import FetchError, check_url
from actors.api.segments import continues_motion, hides_first_frame, read_request
from actors.api.settings import ServiceSettings
from actors.api.sizes import check_size
from actors.api.untrusted.references import IMAGE, IMAGE_FIELDS, LAST, REFERENCES, VIDEO
from actors.jobs.stored_request import count_frames as count_stored_frames
from actors.jobs.tables import Job
from wan_tpu.errors import InvalidRequest
from wan_tpu.lengths import count_frames, read_seconds
from wan_tpu.model_limits import FULL_STRENGTH, name_models
from wan_tpu.plan import RequestPlan
from wan_tpu.reference import SOUNDTRACK, Reference
from wan_tpu.request import (
    SIZE_MULTIPLE,
    STRENGTH,
    GenerationRequest,
    ResolvedRequest,
    nearest_multiple,
    parse_size,
)
from wan_tpu.segments import FRAME, MOTION, check_segment, check_segments, check_soundtrack, choose_motion, count_shared
from wan_tpu.spec import ModelSpec

_EMPTY = Catalogue()
_ANY = Reference("image", None, 512, 512)  # A reference that every model takes if it takes any.
_ANY_TRACK = Reference(SOUNDTRACK, None)
_ALL = "all"  # What a new part begins with if it is neither `FRAME` nor `MOTION`.
_UNNAMED = "default"  # What SGLang's clients call the model of any service.
# Fields of what a video begins with, or follows, which a continuation has from the video that it continues.
_BEGINNINGS = (IMAGE, REFERENCES, "strength", "audio_mode")


class RequestPlanner:
    """Plans videos, and rejects what can't be made, without reading any file.

    Its methods keep a core busy for a while, so call them in threads. They raise `InvalidRequest` and `HttpError`.
    """

    def __init__(self, settings: ServiceSettings, spec: ModelSpec) -> None:
        self._settings, self._spec = settings, spec

    def plan(
        self,
        body: ParsedBody,
        caller: Caller,
        picture: tuple[int, int] | None = None,
        references: Sequence[Reference] | None = None,
    ) -> RequestPlan:
        """Plan a new video.

        Args:
            body: Its fields.
            caller: Who asks for it.
            picture: The (height, width) of its first input where that decides the size. Before it is known, everything
                but the size is checked.
            references: Its references' measures. Before they are known, everything else is checked.
        """
        self._check_job(body.fields, caller)
        if body.has(VIDEO) and not self._spec.takes_video:
            able = name_models(takes_video=True)
            message = f"video was given, but {self._spec.name} doesn't take one; use {able}"
            if "i2v" in self._spec.tasks:
                message += ", or POST /v1/videos/extensions to continue it"
            raise InvalidRequest(message, VIDEO)
        catalogue, seed = self._settings.catalogue, secrets.randbelow(2**31)
        request = make_request(body.fields, self._spec, catalogue, seed=seed, video=body.has(VIDEO))
        if body.fields.input_references:
            request = dataclasses.replace(request, references=references or (_ANY_TRACK if body.locks_sound else _ANY,))
        image, last, video = (body.has(name) for name in (IMAGE, LAST, VIDEO))
        plan = self._spec.plan(request, image=image, last=last, video=video, picture=picture)
        if body.fields.input_references:
            self._check_kinds(body)  # Before any of them is fetched.
        elif body.fields.audio_mode is not None:
            raise InvalidRequest("audio_mode was sent without input_references; leave it out", "audio_mode")
        if (way := body.fields.continue_by) is not None and not body.fields.next_prompts:
            raise InvalidRequest(f"continue_by is {way} without next_prompts; leave it out", "continue_by")
        if picture is not None or not self.follows_input(body):
            return check_size(plan, self._settings.largest, self._spec)
        return plan

    def _check_kinds(self, body: ParsedBody) -> None:
        """Refuse references of kinds that the model doesn't take."""
        kinds = body.list_reference_kinds()
        if body.locks_sound:
            why = None
            if not self._spec.follows_sound:
                why = f"{self._spec.name} can't follow a sound"
            elif kinds.count("audio") != 1:
                why = f"there are {kinds.count('audio')} sounds instead of one"
            if why is not None:
                raise InvalidRequest(f"audio_mode is lock_source, but {why}; leave it out", "audio_mode")
            check_soundtrack(bool(body.fields.next_prompts))
            kinds.remove("audio")
            if kinds == ["image"] and self._spec.follows_sound_from_image and not self._spec.takes_references:
                raise InvalidRequest(
                    "there is an image beside the sound; send it as input_reference, the first frame", REFERENCES
                )
        self._spec.check_reference_kinds(kinds)

    def follows_input(self, body: ParsedBody) -> bool:
        """Return whether a video gets its size from its video, first frame, or from its last one if that is alone."""
        if body.fields.size is not None:
            return False
        return body.has(VIDEO) or (self._spec.follows_image and any(body.has(name) for name in IMAGE_FIELDS))

    def check_extension(self, body: ParsedBody) -> None:
        """Check that a body has a video to continue, and nothing else to begin with."""
        self._spec.check_extension()
        if not body.has(VIDEO):
            raise InvalidRequest(
                'video is missing; send the video to continue as a file, or its id as {"video": {"id": "video_..."}}',
                VIDEO,
            )
        for name in _BEGINNINGS:
            if body.has(name):
                raise InvalidRequest(
                    f"{name} can't be chosen, because the video goes on from another; leave it out",
                    name,
                )

    def plan_extension(self, body: ParsedBody, caller: Caller, picture: tuple[int, int] | None = None) -> RequestPlan:
        """Plan the new part of a video that is continued, as `plan` does."""
        self._check_job(body.fields, caller)
        request = make_request(body.fields, self._spec, self._settings.catalogue, seed=secrets.randbelow(2**31))
        if request.height is None and picture is not None:
            height, width = self._spec.size_to_extend(picture)
            request = dataclasses.replace(request, height=height, width=width)
        plan = self._spec.plan(request, image=True, last=body.has(LAST))
        self._spec.check_extension(plan.request)
        if request.height is not None:
            plan = check_size(plan, self._settings.largest, self._spec)
        return plan

    def plan_again(self, job: Job) -> RequestPlan:
        """Plan a job that repeats another one's request with a new prompt."""
        request = read_request(job, self._settings.catalogue)
        video = job.input_video is not None and not (continues_motion(job) or hides_first_frame(job, self._spec))
        if video and self._spec.continues_video:
            request = dataclasses.replace(request, strength=FULL_STRENGTH)
        image, last = job.input_image is not None, job.input_last_image is not None
        plan = self._spec.plan(request, image=image, last=last, video=video)
        return check_size(plan, self._settings.largest, self._spec)

    def choose_beginning(self, body: ParsedBody, first: ResolvedRequest, frames: int, kind: str) -> str:
        """Return what the new part of a video begins with: its last frame (`FRAME`), its end (`MOTION`), or all of it.

        Args:
            body: The fields of the new part.
            first: The request of its first segment.
            frames: How many frames the video has.
            kind: What its end is, as `choose_motion` takes it.
        """
        spec, wanted = self._spec, body.fields.continue_by
        if body.has(LAST) and wanted == MOTION:
            raise InvalidRequest("continue_by is motion, but last_frame was sent; leave one of them out", "continue_by")
        overlap = spec.overlap.frames if spec.overlap is not None else 0
        takes_end = 0 < overlap <= frames and not body.has(LAST)
        motion = (takes_end or wanted is not None) and choose_motion(spec, first, wanted, kind)
        if wanted == MOTION and frames < (least := overlap or spec.frame_offset):
            raise InvalidRequest(
                f"continue_by is {MOTION}, but the video has {frames} frames, and {spec.name} needs {least}; leave it "
                "out, and the new part begins with its last frame",
                "continue_by",
            )
        if motion:
            return MOTION
        if spec.continues_video and frames >= spec.frame_offset:
            check_segment(spec, first)
            return _ALL
        return FRAME

    def plan_segments(self, body: ParsedBody, first: RequestPlan) -> dict[str, Any]:
        """Return the fields of a job's request that describe the segments after the first one, whose plan is given."""
        prompts, resolved, spec = body.fields.next_prompts or [], first.request, self._spec
        if not prompts:
            return {}
        if body.has(LAST):
            instead = "leave it out, and continue the finished video with it"
            if spec.last_images == "required":
                instead = f"each segment of {spec.name} needs one of its own, so leave next_prompts out"
            raise InvalidRequest(f"last_frame was sent with next_prompts; {instead}", LAST)
        motion = check_segments(spec, resolved, prompts, body.fields.continue_by)
        added = resolved.frames - count_shared(spec, motion=motion)
        return {"next_prompts": prompts, "added_frames": added} | ({"continue_by": MOTION} if motion else {})

    def check_length(self, request: ResolvedRequest, job_fields: Mapping[str, Any]) -> None:
        """Refuse a video that lasts too long with the one that it continues and with all of its segments.

        Args:
            request: Its first segment's request.
            job_fields: Fields of the job's request about the others.
        """
        frames, most = count_stored_frames({"frames": request.frames, **job_fields}), self._settings.limits.extended_s
        if frames > most * request.fps:
            field, remedy = VIDEO, "start a new video"
            if "next_prompts" in job_fields:
                field, remedy = "next_prompts", "send fewer next_prompts"
            lasts = f"the whole video would last {frames / request.fps:.0f} s"
            raise InvalidRequest(f"{lasts}, but at most {most:g} s are allowed; {remedy}", field)

    def _check_job(self, fields: CreateVideo, caller: Caller) -> None:
        """Check the fields about the job, not those about the video."""
        if fields.model not in (None, _UNNAMED, self._settings.model, *self._settings.aliases):
            message = f"this service has no model {str(fields.model)[:80]!r}; it has {self._settings.model!r}"
            raise HttpError(400, message, code="model_not_found", param="model")
        if fields.priority > caller.priority:
            message = f"priority is {fields.priority}; this key may ask for at most {caller.priority}"
            raise HttpError(403, message, code="priority_not_allowed", param="priority")
        if (url := fields.webhook_url) is None:
            return
        if self._settings.webhook_secret_file is None:
            raise InvalidRequest("webhooks are not enabled on this service; leave webhook_url out", "webhook_url")
        try:
            check_url(url, self._settings.webhooks)
        except FetchError as error:
            raise InvalidRequest(str(error), "webhook_url") from None


def choose_adapters(body: CreateVideo, spec: ModelSpec, catalogue: Catalogue) -> list[dict[str, Any]]:
    """Return a request's adapters by name: its own, or else those of its preset; raises `InvalidRequest`."""
    adapters = [] if body.preset is None else catalogue.get_preset_adapters(body.preset, spec)
    if body.loras is None:
        return adapters
    if spec.needs_adapter(body.preset) and body.preset not in {adapter.name for adapter in body.loras}:
        raise InvalidRequest(
            f"preset {body.preset} needs the adapter of its name; leave loras out, or give that one, too", "loras"
        )
    return [adapter.model_dump() for adapter in body.loras]


def make_request(
    body: CreateVideo, spec: ModelSpec, catalogue: Catalogue = _EMPTY, *, seed: int, video: bool = False
) -> GenerationRequest:
    """Return the pipeline's request.

    Args:
        seed: Used if the client sent none.
        video: Whether the new video begins as another one.

    Raises:
        InvalidRequest: A field doesn't suit the model, or the service doesn't offer an adapter or preset.
    """
    height, width = _parse_size(body.size) if body.size is not None else (None, None)
    settings = {name: getattr(body, NAMES.get(name, name)) for name in SETTINGS}
    if body.seconds is not None:
        read_seconds(body.seconds)
        if settings["frames"] is None:
            settings["frames"] = count_frames(body.seconds, settings["fps"] or spec.defaults.fps, spec)
    elif body.next_prompts and settings["frames"] is None and spec.chooses_length:  # All segments have one length.
        settings["frames"] = spec.defaults.frames
    if settings["seed"] is None:
        settings["seed"] = seed
    if video and settings["strength"] is None:
        settings["strength"] = FULL_STRENGTH if spec.continues_video else STRENGTH
    adapters = catalogue.resolve(choose_adapters(body, spec, catalogue))
    return GenerationRequest(prompt=body.prompt, height=height, width=width, loras=adapters, **settings)


def _parse_size(text: str) -> tuple[int, int]:
    """Return (height, width) in pixels; raises `InvalidRequest` with the nearest size that works."""
    height, width = parse_size(text)
    near = [nearest_multiple(side, SIZE_MULTIPLE) for side in (width, height)]
    if near != [width, height]:
        raise InvalidRequest(
            f"size {text} isn't a multiple of {SIZE_MULTIPLE} pixels in both directions; the nearest size is "
            f"{near[0]}x{near[1]}",
            "size",
        )
    return height, width
