"""Turn bodies into jobs: of new videos, and of videos that continue other ones."""

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from actors.api.core.access import Caller
from actors.api.core.bodies import ParsedBody
from actors.api.core.create_video import NAMES, SETTINGS, Adapter, CreateVideo
from actors.api.core.inputs import Inputs
from actors.api.core.planning import Planner, choose_adapters, describe_length
from actors.api.core.receiving import IncomingRequest
from actors.api.fair_semaphore import Work
from actors.api.segments import check_segment
from actors.api.settings import ServiceSettings
from actors.api.untrusted.references import FILES, IMAGE, LAST, VIDEO
from actors.jobs.stored_request import count_frames
from actors.jobs.tables import Job
from wan_tpu.errors import InvalidRequest
from wan_tpu.plan import RequestPlan
from wan_tpu.request import IMAGES as PICTURES
from wan_tpu.request import override
from wan_tpu.spec import ModelSpec

# Fields of a job's request for the original size of its images and video.
_SIZES = {IMAGE: "input_size", LAST: "last_frame_size", VIDEO: "video_size"}
_OF_ONE_VIDEO = ("seed", "frames", "strength")  # Settings that a continuation doesn't inherit.
_FIELDS = {**NAMES, "height": "size", "width": "size"}  # Names of a request's fields in a body.

Draft = tuple[Job, dict[str, bytes]]  # A job that isn't stored yet, and the contents of its own files by their names.
Files = dict[str, bytes | str]  # Inputs by field: contents, or the names of other jobs' files in storage.


class Drafts:
    """Turns bodies into jobs, and rejects what can't be made with `InvalidRequest` or `HttpError`."""

    def __init__(self, settings: ServiceSettings, spec: ModelSpec, inputs: Inputs, work: Work) -> None:
        self._settings, self._spec, self._inputs, self._work = settings, spec, inputs, work
        self._planner = Planner(settings, spec)

    async def draft(self, body: ParsedBody, incoming: IncomingRequest, caller: Caller) -> Draft:
        """Return the job of a new video."""
        spec, planner, owner = self._spec, self._planner, caller.owner
        follows = planner.follows_input(body)
        picture = body.get_size(*FILES) if follows else None
        plan = await self._work.run(owner, planner.plan, body, caller, picture)
        segments = await self._work.run(owner, planner.plan_segments, body, plan)  # Files are read only afterwards.
        files: Files = {}
        sizes: dict[str, str] = {}
        for name in FILES:
            async with self._inputs.open(body, name, incoming, caller) as source:
                if source is None:
                    continue
                if follows and picture is None:  # Only now is the size of the first input known, which was fetched.
                    picture = source.size
                    plan = await self._work.run(owner, planner.plan, body, caller, picture)
                if name == VIDEO and spec.continues_video:
                    files[name], length, _ = await source.convert(plan, spec)
                    spec.check_source(length)
                else:
                    files[name] = await source.fit(plan, spec)
                sizes[_SIZES[name]] = _format_size(source.size)
        return self._make_job(body, caller, plan, files, {**sizes, **segments})

    async def draft_extension(self, body: ParsedBody, incoming: IncomingRequest, caller: Caller) -> Draft:
        """Return the job that continues the body's video."""
        spec, planner, owner = self._spec, self._planner, caller.owner
        planner.check_extension(body)
        reference = body.fields.video
        if reference is not None and reference.id is not None:
            job = await self._inputs.find(reference.id, caller)
            sent, body = body.fields, dataclasses.replace(body, fields=self._inherit(body.fields, job))
            with _explain_inherited(job, sent, body.fields):
                plan = await self._work.run(owner, planner.plan_extension, body, caller)
            # Its last frame is the first frame of the new part.
            video, last_frame = await self._inputs.locate(job, "video", "final_frame", owner=owner)
            files: Files = {IMAGE: last_frame, VIDEO: video}
            sizes = _describe_source(count_frames(job.request), "{width}x{height}".format(**job.request))
            beside = {"extended_from": job.id, **sizes}
        else:
            plan, files, beside = await self._read_upload(body, incoming, caller)
        frames, most = beside["source_frames"], self._settings.limits.extended_s
        if spec.continues_video and frames >= spec.frame_offset:
            # The model continues the video itself rather than its last frame, so all frames that it makes are new.
            del files[IMAGE], beside[_SIZES[IMAGE]]
            await self._work.run(owner, check_segment, spec, plan.request)
        if frames + plan.request.frames - len(files) + 1 > most * plan.request.fps:
            raise InvalidRequest(
                f"the whole video would last more than {most:g} s, the longest that is allowed; start a new video",
                VIDEO,
            )
        async with self._inputs.open(body, LAST, incoming, caller) as last:
            if last is not None:
                files[LAST], beside[_SIZES[LAST]] = await last.fit(plan, spec), _format_size(last.size)
        beside |= await self._work.run(owner, planner.plan_segments, body, plan, frames)
        return self._make_job(body, caller, plan, files, beside)

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

    async def _read_upload(
        self, body: ParsedBody, incoming: IncomingRequest, caller: Caller
    ) -> tuple[RequestPlan, Files, dict[str, Any]]:
        """Plan the new part of a client's video, and re-encode that video in the same size and at the same rate."""
        picture, plan_part = body.get_size(VIDEO), self._planner.plan_extension
        plan = await self._work.run(caller.owner, plan_part, body, caller, picture)
        async with self._inputs.open(body, VIDEO, incoming, caller) as video:
            assert video is not None
            if picture is None:  # It was fetched, so that its size is known only now.
                plan = await self._work.run(caller.owner, plan_part, body, caller, video.size)
            mp4, frames, png = await video.convert(plan, self._spec)
            return plan, {IMAGE: png, VIDEO: mp4}, _describe_source(frames, _format_size(video.size))

    def _make_job(
        self, body: ParsedBody, caller: Caller, plan: RequestPlan, files: Files, beside: Mapping[str, Any]
    ) -> Draft:
        """Return the job of a plan. `beside` are the fields of its request that the pipeline's request doesn't have."""
        fields, resolved = body.fields, plan.request
        request = {name: value for name, value in resolved.to_json().items() if name not in (*PICTURES, "video")}
        names = {name: file if isinstance(file, str) else _make_input_name(name) for name, file in files.items()}
        job = Job(
            owner=caller.owner,
            model=self._settings.model,
            request=request
            | {"model": self._settings.model, "skipped": self._spec.skipped_steps(resolved)}
            | {
                "loras": choose_adapters(fields, self._spec, self._settings.catalogue)
            }  # By name, since their files may move.
            | dict(beside),
            input_image=names.get(IMAGE),
            input_last_image=names.get(LAST),
            input_video=names.get(VIDEO),
            priority=fields.priority,
            deadline=fields.deadline,
            warnings=[*plan.warnings, *describe_length(fields.seconds, resolved, self._spec)],
            body_digest=body.digest,
        )
        for name, size_name in _SIZES.items():
            if (size := beside.get(size_name)) is not None:
                width, height = map(int, size.split("x"))
                job.warnings += self._spec.describe_fit(resolved, name, (height, width))
        return job, {names[name]: file for name, file in files.items() if isinstance(file, bytes)}


def _describe_source(frames: int, size: str) -> dict[str, Any]:
    return {"source_frames": frames, _SIZES[IMAGE]: size, _SIZES[VIDEO]: size}


def _format_size(size: tuple[int, int]) -> str:
    return "{1}x{0}".format(*size)


def _make_input_name(field: str) -> str:
    return f"input-{secrets.token_hex(16)}.{'mp4' if field == VIDEO else 'png'}"


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
