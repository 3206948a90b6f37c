"""Turn a body into a job that can be accepted: plan its request, and fit its images and video to the video's size."""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

from actors.api.core.access import Caller
from actors.api.core.bodies import ParsedBody, open_content, open_file
from actors.api.core.create_video import CreateVideo, choose_adapters, describe_length, make_request
from actors.api.core.errors import HttpError
from actors.api.core.receiving import IncomingRequest
from actors.api.core.sources import Sources, StoredFile
from actors.api.fair_semaphore import Work
from actors.api.outbound.client import FetchError, check_url
from actors.api.segments import check_segment, continue_request
from actors.api.settings import ServiceSettings
from actors.api.sizes import check_size
from actors.api.untrusted.reader import Reader, Reading
from actors.api.untrusted.references import FILES, IMAGE, IMAGES, LAST, VIDEO
from actors.jobs.tables import Job
from wan_tpu.errors import InvalidRequest
from wan_tpu.model_limits import name_models
from wan_tpu.request import IMAGES as PICTURES
from wan_tpu.request import GenerationRequest, ResolvedRequest
from wan_tpu.spec import ModelSpec

# Fields of a job's request for the original size of its images and video.
SIZES = {IMAGE: "input_size", LAST: "last_frame_size", VIDEO: "video_size"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """A request before and after its defaults are filled in, and what a job keeps of its plan."""

    request: GenerationRequest
    resolved: ResolvedRequest
    loras: list[dict[str, Any]]
    skipped_steps: list[int]
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A job that hasn't been accepted yet, with the contents of its inputs, in the order of `Job.inputs`."""

    job: Job
    webhook_url: str | None
    contents: list[bytes | StoredFile]


class Drafts:
    """Turns bodies into jobs, and rejects what can't be made."""

    def __init__(
        self, settings: ServiceSettings, spec: ModelSpec, reader: Reader, work: Work, transfers: Work, sources: Sources
    ) -> None:
        self._settings, self._spec, self._reader, self._work = settings, spec, reader, work
        self._transfers, self._sources = transfers, sources

    async def draft(self, body: ParsedBody, incoming: IncomingRequest, caller: Caller) -> Draft:
        """Return the job and the inputs that a body describes; raises `InvalidRequest`, `HttpError`."""
        spec, owner = self._spec, caller.owner
        plan = await self._work.run(owner, self._plan, body, caller)
        segments = await self._work.run(owner, self.plan_segments, body, plan)  # Files are read only afterwards.
        follows = self._follows_input(plan.request, body)
        files: dict[str, bytes] = {}
        sizes: dict[str, str] = {}
        for name in FILES:
            async with self._open(body, name, incoming, caller) as source:
                if source is None:
                    continue
                reading, source_name = source
                if follows and not files:  # The video's size is known only now, from the first of its inputs.
                    plan = await self._work.run(owner, self._resolve, plan.request, body, reading.sizes[source_name])
                resolved = plan.resolved
                size = {"height": resolved.height, "width": resolved.width, "slack": spec.shape_slack}
                if name == VIDEO and spec.continues_video:
                    files[name], length, _ = await reading.convert_video(fps=resolved.fps, count=incoming.add, **size)
                    spec.check_source(length)
                elif name == VIDEO:
                    frames, step = resolved.frames, spec.frame_step
                    files[name] = await reading.cut_video(frames, step=step, count=incoming.add, **size)
                else:
                    files[name] = await reading.make_picture(name=source_name, count=incoming.add, **size)
                sizes[SIZES[name]] = "{1}x{0}".format(*reading.sizes[source_name])
        return self.build(body, caller, plan, files, {**sizes, **segments})

    def plan_segments(self, body: ParsedBody, first: Planned, source_frames: int = 0) -> dict[str, Any]:
        """Return the fields of a job's request that describe the segments after the first one.

        Args:
            body: The body.
            first: The plan of the first segment.
            source_frames: How many frames of another video come before that.

        Raises:
            InvalidRequest: The model can't make one of them, or the whole video would be too long.
        """
        prompts, resolved, spec = body.fields.next_prompts or [], first.resolved, self._spec
        if not prompts:
            return {}
        if body.has(LAST):
            instead = "leave it out, and continue the finished video with it"
            if spec.last_images == "required":
                instead = f"each segment of {spec.name} needs one of its own, so leave next_prompts out"
            raise InvalidRequest(f"last_frame was sent with next_prompts; {instead}", LAST)
        spec.check_extension(resolved)
        request = dataclasses.replace(first.request, height=resolved.height, width=resolved.width)
        for index, prompt in enumerate(prompts, 1):
            check_segment(spec, continue_request(request, prompt, index))
        added = resolved.frames if spec.continues_video else resolved.frames - 1
        frames, most = source_frames + resolved.frames + len(prompts) * added, self._settings.limits.extended_s
        if frames > most * resolved.fps:
            message = (
                f"the whole video would last {frames / resolved.fps:.0f} s, but at most {most:g} s are "
                "allowed; send fewer next_prompts"
            )
            raise InvalidRequest(message, "next_prompts")
        return {"next_prompts": prompts, "added_frames": added}

    def build(
        self,
        body: ParsedBody,
        caller: Caller,
        plan: Planned,
        files: Mapping[str, bytes | StoredFile],
        beside: Mapping[str, Any],
    ) -> Draft:
        """Return the job of a plan.

        Args:
            body: The body.
            caller: Whose job it becomes.
            plan: The body's plan.
            files: Its inputs, by the names of their fields.
            beside: Fields of the job's request that the pipeline's request doesn't have.
        """
        fields = body.fields
        resolved = {name: value for name, value in plan.resolved.to_json().items() if name not in (*PICTURES, "video")}
        names = {
            name: content.name
            if isinstance(content, StoredFile)
            else make_input_name("mp4" if name == VIDEO else "png")
            for name, content in files.items()
        }
        job = Job(
            owner=caller.owner,
            model=self._settings.model,
            request=resolved
            | {"model": self._settings.model, "loras": plan.loras, "skipped": plan.skipped_steps}
            | dict(beside),
            input_image=names.get(IMAGE),
            input_last_image=names.get(LAST),
            input_video=names.get(VIDEO),
            priority=fields.priority,
            deadline=fields.deadline,
            warnings=[*plan.warnings, *self._list_changes(fields, plan.resolved, beside)],
            body_digest=body.digest,
        )
        return Draft(job=job, webhook_url=fields.webhook_url, contents=[files[name] for name in FILES if name in files])

    def check(self, fields: CreateVideo, caller: Caller) -> None:
        """Check the fields about the job, not those about the video; raises `InvalidRequest`, `HttpError`."""
        self._check_model(fields.model)
        if fields.priority > caller.priority:
            message = f"priority is {fields.priority}; this key may ask for at most {caller.priority}"
            raise HttpError(403, message, code="priority_not_allowed", param="priority")
        self._check_webhook(fields.webhook_url)

    def resolve(self, request: GenerationRequest, body: ParsedBody, **has: Any) -> Planned:
        """Plan a request; raises `InvalidRequest`. This keeps a core busy for a while.

        Args:
            request: The request.
            body: The body that it was made from.
            has: What `ModelSpec.plan` should know about its inputs.
        """
        spec = self._spec
        plan = spec.plan(request, **has)
        adapters = choose_adapters(body.fields, spec, self._settings.catalogue)  # By name, since their files may move.
        skipped = spec.skipped_steps(plan.request)
        return Planned(
            request=request, resolved=plan.request, loras=adapters, skipped_steps=skipped, warnings=plan.warnings
        )

    def _list_changes(self, fields: CreateVideo, resolved: ResolvedRequest, sizes: Mapping[str, Any]) -> list[str]:
        """Return how the video's length and its inputs' shapes differ from what was sent.

        Args:
            fields: What was sent.
            resolved: What is made.
            sizes: The sizes of the inputs' files, by `SIZES`.
        """
        changes = describe_length(fields.seconds, resolved, self._spec)
        for name, size_name in SIZES.items():
            if (size := sizes.get(size_name)) is not None:
                width, height = map(int, size.split("x"))
                changes += self._spec.describe_fit(resolved, name, (height, width))
        return changes

    @contextlib.asynccontextmanager
    async def _open(
        self, body: ParsedBody, name: str, incoming: IncomingRequest, caller: Caller
    ) -> AsyncIterator[tuple[Reading, str] | None]:
        """Open the file of a field as `open_file` does, or the video that a field names by its id."""
        reference = body.fields.video
        if name != VIDEO or reference is None or reference.id is None:
            async with open_file(body, name, incoming, self._reader, self._settings.fetch) as source:
                yield source
            return
        job = await asyncio.to_thread(self._sources.find, reference.id, caller)
        size = await self._transfers.run(caller.owner, self._sources.measure, job, "video")
        most = self._reader.limits.video_bytes
        if size > most:
            message = (
                f"{job.id} has {size} bytes, but an input video may have at most {most}; send a part of it as a file"
            )
            raise InvalidRequest(message, VIDEO)
        incoming.add(size)
        [content] = await self._transfers.run(caller.owner, self._sources.read, job, "video")
        async with open_content(content, incoming, self._reader) as reading:
            yield reading, VIDEO

    def _plan(self, body: ParsedBody, caller: Caller) -> Planned:
        """Check and plan a body; raises `InvalidRequest`, `HttpError`. This keeps a core busy for a while."""
        self.check(body.fields, caller)
        if body.has(VIDEO) and not self._spec.takes_video:
            able = name_models(takes_video=True)
            message = f"video was given, but {self._spec.name} doesn't take one; use {able}"
            if "i2v" in self._spec.tasks:
                message += ", or POST /v1/videos/extensions to continue it"
            raise InvalidRequest(message, VIDEO)
        catalogue, seed = self._settings.catalogue, secrets.randbelow(2**31)
        request = make_request(body.fields, self._spec, catalogue, seed=seed, video=body.has(VIDEO))
        return self._resolve(request, body, None)

    def _resolve(self, request: GenerationRequest, body: ParsedBody, picture: tuple[int, int] | None) -> Planned:
        """Plan a request, with the (height, width) of its image or video once known; raises `InvalidRequest`."""
        has = {"image": body.has(IMAGE), "last": body.has(LAST), "video": body.has(VIDEO), "picture": picture}
        plan = self.resolve(request, body, **has)
        if picture is not None or not self._follows_input(request, body):
            check_size(plan.resolved, self._settings.largest, self._spec)
        return plan

    def _follows_input(self, request: GenerationRequest, body: ParsedBody) -> bool:
        """Return whether a video gets its size from its video, first frame, or from its last one if that is alone."""
        if request.height is not None:
            return False
        return body.has(VIDEO) or (self._spec.follows_image and any(body.has(name) for name in IMAGES))

    def _check_model(self, model: str | None) -> None:
        if model is not None and model not in (self._settings.model, *self._settings.aliases):
            message = f"this service has no model {model[:80]!r}; it has {self._settings.model!r}"
            raise HttpError(400, message, code="model_not_found", param="model")

    def _check_webhook(self, url: str | None) -> None:
        if url is None:
            return
        if self._settings.webhook_secret_file is None:
            raise InvalidRequest("webhooks are not enabled on this service; leave webhook_url out", "webhook_url")
        try:
            check_url(url, self._settings.webhooks)
        except FetchError as error:
            raise InvalidRequest(str(error), "webhook_url") from None


def make_input_name(ending: str) -> str:
    """Return a new name for an input in storage."""
    return f"input-{secrets.token_hex(16)}.{ending}"
