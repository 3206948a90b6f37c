"""Plan the video of a body, if it can be made: from its fields to the pipeline's request, and from that to its plan."""

import dataclasses
import secrets
from typing import Any

from actors.api.catalogue import Catalogue
from actors.api.core.access import Caller
from actors.api.core.bodies import ParsedBody
from actors.api.core.create_video import NAMES, SETTINGS, CreateVideo
from actors.api.core.errors import HttpError
from actors.api.outbound.client import FetchError, check_url
from actors.api.segments import check_segment, continue_request
from actors.api.settings import ServiceSettings
from actors.api.sizes import check_size
from actors.api.untrusted.references import IMAGE, IMAGES, LAST, VIDEO
from wan_tpu.errors import InvalidRequest
from wan_tpu.lengths import count_frames, format_seconds, read_seconds
from wan_tpu.model_limits import FULL_STRENGTH, name_models
from wan_tpu.plan import RequestPlan
from wan_tpu.request import (
    SIZE_MULTIPLE,
    STRENGTH,
    GenerationRequest,
    ResolvedRequest,
    nearest_multiple,
    parse_size,
)
from wan_tpu.spec import ModelSpec

_EMPTY = Catalogue()
_BEGINNINGS = (IMAGE, "strength")  # Fields that would make a continuation begin in another way.


class Planner:
    """Plans videos, and rejects what can't be made, without reading any file.

    Its methods keep a core busy for a while, so call them in threads. They raise `InvalidRequest` and `HttpError`.
    """

    def __init__(self, settings: ServiceSettings, spec: ModelSpec) -> None:
        self._settings, self._spec = settings, spec

    def plan(self, body: ParsedBody, caller: Caller, picture: tuple[int, int] | None = None) -> RequestPlan:
        """Plan a new video, with the (height, width) of its first input where that decides the size and is known.

        Before it is known, everything but the size is checked.
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
        image, last, video = (body.has(name) for name in (IMAGE, LAST, VIDEO))
        plan = self._spec.plan(request, image=image, last=last, video=video, picture=picture)
        if picture is not None or not self.follows_input(body):
            check_size(plan.request, self._settings.largest, self._spec)
        return plan

    def follows_input(self, body: ParsedBody) -> bool:
        """Return whether a video gets its size from its video, first frame, or from its last one if that is alone."""
        if body.fields.size is not None:
            return False
        return body.has(VIDEO) or (self._spec.follows_image and any(body.has(name) for name in IMAGES))

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
                    f"{name} can't be chosen, because the video begins with the last frame of another; leave it out",
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
            check_size(plan.request, self._settings.largest, self._spec)
        return plan

    def plan_segments(self, body: ParsedBody, first: RequestPlan, source_frames: int = 0) -> dict[str, Any]:
        """Return the fields of a job's request that describe the segments after the first one.

        Args:
            body: The body.
            first: The plan of the first segment.
            source_frames: How many frames of another video come before that.
        """
        prompts, resolved, spec = body.fields.next_prompts or [], first.request, self._spec
        if not prompts:
            return {}
        if body.has(LAST):
            instead = "leave it out, and continue the finished video with it"
            if spec.last_images == "required":
                instead = f"each segment of {spec.name} needs one of its own, so leave next_prompts out"
            raise InvalidRequest(f"last_frame was sent with next_prompts; {instead}", LAST)
        spec.check_extension(resolved)
        check_segment(spec, continue_request(resolved, prompts[0], 1))  # The others differ in their prompts only.
        added = resolved.frames if spec.continues_video else resolved.frames - 1
        frames, most = source_frames + resolved.frames + len(prompts) * added, self._settings.limits.extended_s
        if frames > most * resolved.fps:
            message = (
                f"the whole video would last {frames / resolved.fps:.0f} s, but at most {most:g} s are "
                "allowed; send fewer next_prompts"
            )
            raise InvalidRequest(message, "next_prompts")
        return {"next_prompts": prompts, "added_frames": added}

    def _check_job(self, fields: CreateVideo, caller: Caller) -> None:
        """Check the fields about the job, not those about the video."""
        if fields.model is not None and fields.model not in (self._settings.model, *self._settings.aliases):
            message = f"this service has no model {fields.model[:80]!r}; it has {self._settings.model!r}"
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
    return adapters if body.loras is None else [adapter.model_dump() for adapter in body.loras]


def make_request(
    body: CreateVideo, spec: ModelSpec, catalogue: Catalogue = _EMPTY, *, seed: int, video: bool = False
) -> GenerationRequest:
    """Return the pipeline's request.

    Args:
        body: The fields that the client sent.
        spec: The model.
        catalogue: The adapters that the service offers.
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


def describe_length(seconds: str | None, request: ResolvedRequest, spec: ModelSpec) -> list[str]:
    """Return a warning if a video's length differs from the one that was asked for by more than rounding."""
    if seconds is None or abs(float(seconds) * request.fps - request.frames) <= spec.frame_step / 2:
        return []
    made = format_seconds(request.frames / request.fps)
    return [f"seconds is {seconds!r}, but the video lasts {made} s, since it has {request.frames} frames"]
