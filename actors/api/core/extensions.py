"""Turn a body into the job of a video that continues another one."""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Iterator
from typing import Any

from actors.api.core.access import Caller
from actors.api.core.bodies import ParsedBody, open_file
from actors.api.core.create_video import NAMES, SETTINGS, Adapter, CreateVideo, make_request
from actors.api.core.drafts import SIZES, Draft, Drafts, Planned
from actors.api.core.receiving import IncomingRequest
from actors.api.core.sources import FINAL_FRAME, Sources, StoredFile
from actors.api.fair_semaphore import Work
from actors.api.segments import check_segment
from actors.api.settings import ServiceSettings
from actors.api.sizes import check_size
from actors.api.untrusted.reader import Reader
from actors.api.untrusted.references import IMAGE, LAST, VIDEO
from actors.jobs.stored_request import count_frames
from actors.jobs.tables import Job
from wan_tpu.errors import InvalidRequest
from wan_tpu.request import GenerationRequest, override
from wan_tpu.spec import ModelSpec

_BEGINNINGS = (IMAGE, "strength")  # Fields that would make a video begin in another way.
_OF_ONE_VIDEO = ("seed", "frames", "strength")  # Settings that a continuation doesn't inherit.
_FIELDS = {**NAMES, "height": "size", "width": "size"}  # Names of a request's fields in a body.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """The video that is continued.

    Attributes:
        frames: The number of its frames.
        files: The video, and its last frame as the first frame of the new part, by the names of a body's fields.
        beside: Fields of the new job's request that refer to the video.
    """

    frames: int
    files: dict[str, bytes | StoredFile]
    beside: dict[str, str]


class Extensions:
    """Turns bodies into jobs that continue videos, and rejects what can't be made."""

    def __init__(
        self,
        settings: ServiceSettings,
        spec: ModelSpec,
        reader: Reader,
        work: Work,
        transfers: Work,
        sources: Sources,
        drafts: Drafts,
    ) -> None:
        self._settings, self._spec, self._reader, self._work = settings, spec, reader, work
        self._transfers, self._sources, self._drafts = transfers, sources, drafts

    async def draft(self, body: ParsedBody, incoming: IncomingRequest, caller: Caller) -> Draft:
        """Return the job and the inputs that a body describes; raises `InvalidRequest`, `HttpError`."""
        self._check(body)
        reference = body.fields.video
        if reference is not None and reference.id is not None:
            job = await asyncio.to_thread(self._sources.find, reference.id, caller)
            sent, body = body.fields, dataclasses.replace(body, fields=self._inherit(body.fields, job))
            with _explain_inherited(job, sent, body.fields):
                plan = await self._work.run(caller.owner, self._plan, body, caller, None)
            source = await self._transfers.run(caller.owner, self._find_source, job)
        else:
            plan = await self._work.run(caller.owner, self._plan, body, caller, None)
            plan, source = await self._read_upload(body, plan, incoming, caller)
        files, origin = source.files, source.beside
        if self._spec.continues_video and source.frames >= self._spec.frame_offset:
            # The model continues the video itself rather than its last frame, so all frames that it makes are new.
            files = {VIDEO: files[VIDEO]}
            origin = {name: value for name, value in origin.items() if name != SIZES[IMAGE]}
            await self._work.run(caller.owner, check_segment, self._spec, plan.request)
        most = self._settings.limits.extended_s
        if source.frames + plan.resolved.frames - len(files) + 1 > most * plan.resolved.fps:
            raise InvalidRequest(
                f"the whole video would last more than {most:g} s, the longest that is allowed; start a new video",
                VIDEO,
            )
        sizes = {}
        async with open_file(body, LAST, incoming, self._reader, self._settings.fetch) as opened_file:
            if opened_file is not None:
                reading, name = opened_file
                sizes[SIZES[LAST]] = "{1}x{0}".format(*reading.sizes[name])
                height, width, slack = plan.resolved.height, plan.resolved.width, self._spec.shape_slack
                files[LAST] = await reading.make_picture(height, width, slack=slack, name=name, count=incoming.add)
        segments = await self._work.run(caller.owner, self._drafts.plan_segments, body, plan, source.frames)
        beside = {"source_frames": source.frames, **origin, **sizes, **segments}
        return self._drafts.build(body, caller, plan, files, beside)

    def _check(self, body: ParsedBody) -> None:
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

    def _inherit(self, fields: CreateVideo, source: Job) -> CreateVideo:
        """Return a body's fields, in which missing settings are those of the video that it continues."""
        request = source.request
        size = f"{request['width']}x{request['height']}"
        for name, value in (("size", size), ("fps", request["fps"])):
            if getattr(fields, name) not in (None, value):
                raise InvalidRequest(f"{name} can't be changed; {source.id} has {value}, so leave it out", name)
        own = {name: value for name in SETTINGS if (value := getattr(fields, NAMES.get(name, name))) is not None}
        preset = self._spec.presets.get(request.get("preset") or "")
        more: dict[str, Any] = {"size": size}
        inherited = {"fps": request["fps"]}
        # Settings of another model, such as a few-step one, would be accepted by this one and spoil the video.
        is_same_model = (source.model or request["model"]) == self._settings.model
        if is_same_model and fields.preset is None and (preset is None or not preset.text_only):
            inherited = {name: request[name] for name in SETTINGS if name in request and name not in _OF_ONE_VIDEO}
            # The settings of a preset that the model no longer has are known, since a job keeps all its settings.
            inherited["preset"] = None if preset is None else request["preset"]
            if fields.loras is None:
                more["loras"] = [Adapter(**adapter) for adapter in request.get("loras", ())]
        if is_same_model and fields.seconds is None:
            inherited["frames"] = request["frames"]
        settings = override(inherited, own)
        return fields.model_copy(update={NAMES.get(name, name): value for name, value in settings.items()} | more)

    def _plan(self, body: ParsedBody, caller: Caller, picture: tuple[int, int] | None) -> Planned:
        """Plan a body, once the (height, width) of its video is known if that decides the size."""
        self._drafts.check(body.fields, caller)
        catalogue, seed = self._settings.catalogue, secrets.randbelow(2**31)
        return self._resolve(make_request(body.fields, self._spec, catalogue, seed=seed), body, picture)

    def _resolve(self, request: GenerationRequest, body: ParsedBody, picture: tuple[int, int] | None) -> Planned:
        if request.height is None and picture is not None:
            height, width = self._spec.size_to_extend(picture)
            request = dataclasses.replace(request, height=height, width=width)
        plan = self._drafts.resolve(request, body, image=True, last=body.has(LAST))
        self._spec.check_extension(plan.resolved)
        if request.height is not None:
            check_size(plan.resolved, self._settings.largest, self._spec)
        return plan

    def _find_source(self, job: Job) -> _Source:
        """Find a video of this service and its last frame, without reading them."""
        video, last_frame = self._sources.locate(job, "video", FINAL_FRAME)
        frames, size = count_frames(job.request), "{width}x{height}".format(**job.request)
        return _Source(
            frames=frames,
            files={IMAGE: last_frame, VIDEO: video},
            beside={"extended_from": job.id, SIZES[IMAGE]: size, SIZES[VIDEO]: size},
        )

    async def _read_upload(
        self, body: ParsedBody, plan: Planned, incoming: IncomingRequest, caller: Caller
    ) -> tuple[Planned, _Source]:
        """Re-encode a client's video in the size and at the rate of the new part, and plan that part."""
        async with open_file(body, VIDEO, incoming, self._reader, self._settings.fetch) as opened_file:
            assert opened_file is not None
            reading, name = opened_file
            plan = await self._work.run(caller.owner, self._resolve, plan.request, body, reading.sizes[name])
            size = {"height": plan.resolved.height, "width": plan.resolved.width, "slack": self._spec.shape_slack}
            mp4, frames, png = await reading.convert_video(fps=plan.resolved.fps, count=incoming.add, **size)
            size_text = "{1}x{0}".format(*reading.sizes[name])
        size_texts = {SIZES[IMAGE]: size_text, SIZES[VIDEO]: size_text}
        return plan, _Source(frames=frames, files={IMAGE: png, VIDEO: mp4}, beside=size_texts)


@contextlib.contextmanager
def _explain_inherited(source: Job, sent: CreateVideo, completed: CreateVideo) -> Iterator[None]:
    """Say where a setting comes from if it is refused and the client didn't send it.

    Args:
        source: The job whose settings a body inherits.
        sent: The fields that the client sent.
        completed: The same, with the inherited ones.
    """
    try:
        yield
    except InvalidRequest as error:
        field = _FIELDS.get(error.field or "", error.field or "")
        if getattr(sent, field, None) is not None or getattr(completed, field, None) is None:
            raise
        own = "" if field in ("size", "fps") else f"send {field}, or "
        raise InvalidRequest(
            f"{field} of {source.id} can't be used for its continuation: {error}. To continue it, {own}send its "
            "file as video, which is converted, and whose settings are not inherited",
            field,
        ) from None
