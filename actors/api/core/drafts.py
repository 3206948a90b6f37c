"""Turn bodies into jobs: of new videos, and of videos that continue other ones."""

import contextlib
import dataclasses
import hashlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from actors.api.core.access import Caller
from actors.api.core.bodies import ParsedBody
from actors.api.core.create_video import NAMES, SETTINGS, Adapter, CreateVideo
from actors.api.core.inputs import Inputs, check_completed
from actors.api.core.planning import RequestPlanner, choose_adapters
from actors.api.core.receiving import IncomingRequest
from actors.api.fair_semaphore import Work
from actors.api.segments import can_read, check_motion, find_end, make_segment_again
from actors.api.settings import ServiceSettings
from actors.api.untrusted.references import FILES, IMAGE, LAST, REFERENCES, VIDEO, name_reference
from actors.jobs.stored_request import count_frames, read_redo, set_frames
from actors.jobs.tables import Job
from wan_tpu.errors import InvalidRequest
from wan_tpu.lengths import describe_length
from wan_tpu.plan import RequestPlan
from wan_tpu.reference import CONTINUED, TAIL
from wan_tpu.request import IMAGES, override
from wan_tpu.segments import FRAME, MOTION, count_shared
from wan_tpu.spec import ModelSpec

# Fields of a job's request for the original size of its images and video.
_SIZES = {IMAGE: "input_size", LAST: "last_frame_size", VIDEO: "video_size"}
# Settings that a continuation doesn't inherit.
_OF_ONE_VIDEO = ("seed", "frames", "max_seconds", "strength", "reference_size")
_FIELDS = {**NAMES, "height": "size", "width": "size"}  # Names of a request's fields in a body.


class Take(NamedTuple):
    """What a video is made again with."""

    prompt: str
    segment: int | None = None  # The only segment that is made again, counted from 1; None for the whole video.
    seed: int | None = None  # That segment's; None for a random one.

    def digest(self, source: Job) -> str:
        """Return what tells it from other takes."""
        more = "" if self.segment is None else f"\0{self.segment}\0{self.seed}"
        return hashlib.sha256(f"{source.id}\0{self.prompt}{more}".encode()).hexdigest()


Draft = tuple[Job, dict[str, bytes]]  # A job that isn't stored yet, and the contents of its own files by their names.
Files = dict[str, bytes | str]  # Inputs by field: contents, or the names of other jobs' files in storage.


class _Source(NamedTuple):
    """The video that a new part continues. Files are their contents, or the names of another job's in storage."""

    video: bytes | str
    last_frame: bytes | str
    frames: int
    size: str  # WIDTHxHEIGHT before it was fitted.
    id: str | None = None  # Its job's.
    end: str | None = None  # Name of its end, where the new part could begin with that.


class Drafts:
    """Turns bodies into jobs, and rejects what can't be made with `InvalidRequest` or `HttpError`."""

    def __init__(self, settings: ServiceSettings, spec: ModelSpec, inputs: Inputs, work: Work) -> None:
        self._settings, self._spec, self._inputs, self._work = settings, spec, inputs, work
        self._planner = RequestPlanner(settings, spec)

    async def draft(self, body: ParsedBody, incoming: IncomingRequest, caller: Caller) -> Draft:
        spec, planner, owner = self._spec, self._planner, caller.owner
        follows = planner.follows_input(body)
        picture = body.get_size(*FILES) if follows else None
        plan = await self._work.run(owner, planner.plan, body, caller, picture)
        segments = await self._work.run(owner, planner.plan_segments, body, plan)  # Files are read only afterwards.
        if segments:
            planner.check_length(plan.request, segments)
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
        references = []
        for index, _ in enumerate(body.fields.input_references or ()):
            async with self._inputs.open_reference(body, index, incoming) as reference:
                files[name_reference(index)], measured = await reference.fit(
                    plan, spec, self._work, locks_sound=body.locks_sound
                )
                references.append(measured)
        if references:
            plan = await self._work.run(owner, planner.plan, body, caller, picture, references)
        mode = {"audio_mode": body.fields.audio_mode} if body.locks_sound else {}
        return self._make_job(body, caller, plan, files, {**sizes, **segments, **mode})

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
            video, last_frame = await self._inputs.locate(job, "video", "final_frame", owner=owner)
            size = "{width}x{height}".format(**job.request)
            source = _Source(video, last_frame, count_frames(job.request), size, job.id)
            is_same_model = (job.model or job.request["model"]) == self._settings.model
            if is_same_model and self._has_all_stages(job, plan):
                source = source._replace(end=find_end(job))
        else:
            plan, source = await self._read_upload(body, incoming, caller)
        files: Files = {VIDEO: source.video}
        job_fields: dict[str, Any] = {"source_frames": source.frames, _SIZES[VIDEO]: source.size}
        if source.id is not None:
            job_fields["extended_from"] = source.id
        kind = CONTINUED if source.end is None else TAIL
        begins_with = await self._work.run(owner, planner.choose_beginning, body, plan.request, source.frames, kind)
        if begins_with == FRAME:
            files[IMAGE], job_fields[_SIZES[IMAGE]] = source.last_frame, source.size
        elif begins_with == MOTION:
            added = plan.request.frames - count_shared(spec, motion=True)
            job_fields |= {"continue_by": MOTION, "added_frames": added}
            if source.end is not None:
                job_fields["end_file"] = source.end
        planner.check_length(plan.request, job_fields)
        job_fields |= await self._work.run(owner, planner.plan_segments, body, plan)
        planner.check_length(plan.request, job_fields)
        async with self._inputs.open(body, LAST, incoming, caller) as last:
            if last is not None:
                files[LAST], job_fields[_SIZES[LAST]] = await last.fit(plan, spec), _format_size(last.size)
        return self._make_job(body, caller, plan, files, job_fields)

    def draft_remix(self, source: Job, take: Take, caller: Caller) -> Job:
        """Return the job that repeats another one's request with a new prompt; both share their files.

        Raises:
            InvalidRequest: The model can't make it, or the other one has no such segment.
            HttpError: A segment of the other one is to be made again, and that one hasn't completed.
        """
        request = {name: value for name, value in source.request.items() if name != "redo"} | {"prompt": take.prompt}
        segments, end = list[str](), None
        if take.segment is not None:
            check_completed(source)
            seed = secrets.randbelow(2**31) if take.seed is None else take.seed
            request = make_segment_again(source, take.segment, take.prompt, seed)
        if (redo := read_redo(request)) is not None:
            segments, end = [name for name in redo.parts[: redo.segment - 1] if name is not None], redo.begins_with
        job = Job(
            owner=caller.owner,
            model=self._settings.model,
            request=request,
            segments=segments,
            segments_end=end,
            input_image=source.input_image,
            input_last_image=source.input_last_image,
            input_video=source.input_video,
            priority=min(source.priority, caller.priority),
            remixed_from=source.id,
        )
        if can_read(job):  # What only a later version can read is planned by its workers.
            plan = self._planner.plan_again(job)
            # The length is open again if the source's was, and the operator's largest size may have changed.
            job.request = set_frames(job.request, plan.request.frames)
            if plan.request.max_seconds is not None:
                job.request["max_seconds"] = plan.request.max_seconds
            check_motion(job, self._spec, plan.request)
            of_adapters = self._settings.catalogue.list_warnings(plan.request.loras)
            job.warnings = [*plan.warnings, *of_adapters, *self._describe_fits(plan, job.request)]
        return job

    def _inherit(self, fields: CreateVideo, source: Job) -> CreateVideo:
        """Return a body's fields, in which missing settings are those of the video that it continues."""
        request = source.request
        size = f"{request['width']}x{request['height']}"
        for name, value in (("size", size), ("fps", request["fps"])):
            if getattr(fields, name) not in (None, value):
                raise InvalidRequest(f"{name} can't be changed; {source.id} has {value}, so leave it out", name)
        sent = {name: value for name in SETTINGS if (value := getattr(fields, NAMES.get(name, name))) is not None}
        preset = self._spec.presets.get(request.get("preset") or "")
        more: dict[str, Any] = {"size": size}
        inherited = {"fps": request["fps"]}
        # Settings of another model, such as a few-step one, would be accepted by this one and spoil the video.
        is_same_model = (source.model or request["model"]) == self._settings.model
        if is_same_model and fields.preset is None and (preset is None or preset.takes_images):
            inherited = {name: request[name] for name in SETTINGS if name in request and name not in _OF_ONE_VIDEO}
            # The settings of a preset that the model no longer has are known, since a job keeps all its settings.
            inherited["preset"] = None if preset is None else request["preset"]
            if fields.loras is None:
                more["loras"] = [Adapter(**adapter) for adapter in request.get("loras", ())]
        if is_same_model and fields.seconds is None:
            inherited["frames"] = request["frames"]
        settings = override(inherited, sent)
        return fields.model_copy(update={NAMES.get(name, name): value for name, value in settings.items()} | more)

    def _has_all_stages(self, source: Job, plan: RequestPlan) -> bool:
        """Return whether a video's end has the latents of each stage of a plan; the number of steps may decide that."""
        steps, sigmas = source.request["steps"], source.request.get("sigmas")
        before = dataclasses.replace(plan.request, steps=steps, sigmas=sigmas and tuple(sigmas))
        return len(self._spec.experts(before)) >= len(self._spec.experts(plan.request))

    async def _read_upload(
        self, body: ParsedBody, incoming: IncomingRequest, caller: Caller
    ) -> tuple[RequestPlan, "_Source"]:
        """Plan the new part of a client's video, and re-encode that video in the same size and at the same rate."""
        picture, plan_part = body.get_size(VIDEO), self._planner.plan_extension
        plan = await self._work.run(caller.owner, plan_part, body, caller, picture)
        async with self._inputs.open(body, VIDEO, incoming, caller) as video:
            assert video is not None
            if picture is None:  # It was fetched, so that its size is known only now.
                plan = await self._work.run(caller.owner, plan_part, body, caller, video.size)
            mp4, frames, png = await video.convert(plan, self._spec)
            return plan, _Source(mp4, png, frames, _format_size(video.size))

    def _make_job(
        self, body: ParsedBody, caller: Caller, plan: RequestPlan, files: Files, job_fields: Mapping[str, Any]
    ) -> Draft:
        """Return the job of a plan; `job_fields` are those of its request that `stored_request.JOB_FIELDS` names."""
        fields, resolved = body.fields, plan.request
        request = {name: value for name, value in resolved.to_json().items() if name not in (*IMAGES, "video")}
        names = {name: file if isinstance(file, str) else _make_input_name(name) for name, file in files.items()}
        references = [names[name_reference(index)] for index, _ in enumerate(resolved.references or ())]
        is_new = not self._spec.takes_references and not job_fields.keys().isdisjoint(("continue_by", "audio_mode"))
        job = Job(
            owner=caller.owner,
            model=self._settings.model,
            request=request
            | {"model": self._settings.model, "skipped": self._spec.skipped_steps(resolved)}
            | {
                "loras": choose_adapters(fields, self._spec, self._settings.catalogue)
            }  # By name, since their files may move.
            | ({"reference_files": references} if references else {})
            | ({"without_references": True} if is_new else {})  # Earlier versions leave it to this one.
            | dict(job_fields),
            input_image=names.get(IMAGE),
            input_last_image=names.get(LAST),
            input_video=names.get(VIDEO),
            priority=fields.priority,
            deadline=fields.deadline,
            warnings=[
                *plan.warnings,
                *self._settings.catalogue.list_warnings(resolved.loras),
                *describe_length(fields.seconds, resolved, self._spec),
                *self._describe_fits(plan, job_fields),
            ],
            body_digest=body.digest,
        )
        return job, {names[name]: file for name, file in files.items() if isinstance(file, bytes)}

    def _describe_fits(self, plan: RequestPlan, job_fields: Mapping[str, Any]) -> list[str]:
        """Return warnings of images and videos that are cropped or stretched."""
        warnings: list[str] = []
        for name, size_name in _SIZES.items():
            if (size := job_fields.get(size_name)) is not None:
                width, height = map(int, size.split("x"))
                warnings += self._spec.describe_fit(plan.request, name, (height, width))
        return warnings


def _format_size(size: tuple[int, int]) -> str:
    return "{1}x{0}".format(*size)


def _make_input_name(field: str) -> str:
    kind = "bin" if field.startswith(REFERENCES) else "mp4" if field == VIDEO else "png"
    return f"input-{secrets.token_hex(16)}.{kind}"


@contextlib.contextmanager
def _explain_inherited(source: Job, sent: CreateVideo, completed: CreateVideo) -> Iterator[None]:
    """Say where a setting comes from if it is refused and the client didn't send it."""
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
