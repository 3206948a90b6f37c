"""Turn a body into a job that can be accepted: plan its request, and fit its images to the video's size."""

import dataclasses
import secrets
from typing import Any

from actors.api.http.access import Caller
from actors.api.http.bodies import ParsedBody, open_image
from actors.api.http.error_answers import HttpError
from actors.api.intake.create_video import choose_adapters, make_request
from actors.api.intake.fair_semaphore import Work
from actors.api.intake.reader import Reader
from actors.api.intake.receiving import IncomingRequest
from actors.api.intake.references import IMAGE, IMAGES, LAST
from actors.api.outbound.client import FetchError, check_url
from actors.api.settings import ServiceSettings
from actors.api.sizes import check_size
from actors.jobs.tables import Job
from wan_tpu.errors import InvalidRequest
from wan_tpu.request import IMAGES as PICTURES
from wan_tpu.request import GenerationRequest, ResolvedRequest
from wan_tpu.spec import ModelSpec

# Fields of a job's request for the original size of its images.
_SIZES = {IMAGE: "input_size", LAST: "last_frame_size"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Planned:
    """A request before and after its defaults are filled in, and what a job keeps of its plan."""

    request: GenerationRequest
    resolved: ResolvedRequest
    loras: list[dict[str, Any]]
    skipped_steps: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A job that hasn't been accepted yet, with its input images as PNG files."""

    job: Job
    webhook_url: str | None
    pngs: list[bytes]


class Drafts:
    """Turns bodies into jobs, and rejects what can't be made."""

    def __init__(self, settings: ServiceSettings, spec: ModelSpec, reader: Reader, work: Work) -> None:
        self._settings, self._spec, self._reader, self._work = settings, spec, reader, work

    async def draft(self, body: ParsedBody, incoming: IncomingRequest, caller: Caller) -> Draft:
        """Return the job and the input images that a body describes; raises `InvalidRequest`, `HttpError`."""
        fields, spec, owner = body.fields, self._spec, caller.owner
        plan = await self._work.run(owner, self._plan, body, caller)
        follows = self._follows_image(plan.request, body)
        pngs: list[bytes] = []
        sizes: dict[str, str] = {}
        for name in IMAGES:
            async with open_image(body, name, incoming, self._reader, self._settings.fetch) as source:
                if source is None:
                    continue
                reading, source_name = source
                if follows and not pngs:  # Only now is the video's size known, from the first of its images.
                    plan = await self._work.run(owner, self._resolve, plan.request, body, reading.sizes[source_name])
                height, width = plan.resolved.height, plan.resolved.width
                png = await reading.make_picture(
                    height, width, slack=spec.shape_slack, name=source_name, count=incoming.add
                )
                pngs.append(png)
                sizes[_SIZES[name]] = "{1}x{0}".format(*reading.sizes[source_name])
        job = Job(
            owner=owner,
            model=self._settings.model,
            request={name: value for name, value in plan.resolved.to_json().items() if name not in PICTURES}
            | {"model": self._settings.model, "seconds": _confirm_seconds(fields.seconds, plan.resolved, spec)}
            | {"loras": plan.loras}
            | {"skipped": plan.skipped_steps}
            | sizes,
            input_image=make_image_name() if _SIZES[IMAGE] in sizes else None,
            input_last_image=make_image_name() if _SIZES[LAST] in sizes else None,
            priority=fields.priority,
            deadline=fields.deadline,
            body_digest=body.digest,
        )
        return Draft(job=job, webhook_url=fields.webhook_url, pngs=pngs)

    def _plan(self, body: ParsedBody, caller: Caller) -> _Planned:
        """Check and plan a body; raises `InvalidRequest`, `HttpError`. This keeps a core busy for a while."""
        fields, catalogue = body.fields, self._settings.catalogue
        self._check_model(fields.model)
        if fields.priority > caller.priority:
            message = f"priority is {fields.priority}; this key may ask for at most {caller.priority}"
            raise HttpError(403, message, code="priority_not_allowed", param="priority")
        self._check_webhook(fields.webhook_url)
        request = make_request(fields, self._spec, catalogue, seed=secrets.randbelow(2**31))
        return self._resolve(request, body, None)

    def _resolve(self, request: GenerationRequest, body: ParsedBody, picture: tuple[int, int] | None) -> _Planned:
        """Plan a request, with the (height, width) of its image once that is known; raises `InvalidRequest`."""
        image, last, spec = body.has(IMAGE), body.has(LAST), self._spec
        resolved = spec.plan(request, image=image, last=last, picture=picture).request
        if picture is not None or not self._follows_image(request, body):
            check_size(resolved, self._settings.largest, spec)
        loras = choose_adapters(body.fields, spec, self._settings.catalogue)  # By name, since their files may move.
        return _Planned(request=request, resolved=resolved, loras=loras, skipped_steps=spec.skipped_steps(resolved))

    def _follows_image(self, request: GenerationRequest, body: ParsedBody) -> bool:
        """Return whether a video gets its size from its first frame, or from its last one if that is alone."""
        return any(body.has(name) for name in IMAGES) and request.height is None and self._spec.follows_image

    def _check_model(self, model: str | None) -> None:
        if model is not None and model not in (self._settings.model, *self._settings.aliases):
            message = f"there is no model {model[:80]!r} here; there is {self._settings.model!r}"
            raise HttpError(400, message, code="model_not_found", param="model")

    def _check_webhook(self, url: str | None) -> None:
        if url is None:
            return
        if self._settings.webhook_secret_file is None:
            raise InvalidRequest("this service calls no webhooks; leave webhook_url out", "webhook_url")
        try:
            check_url(url, self._settings.webhooks)
        except FetchError as error:
            raise InvalidRequest(str(error), "webhook_url") from None


def _confirm_seconds(seconds: str | None, request: ResolvedRequest, spec: ModelSpec) -> str | None:
    """Return the length that a client asked for, as answers repeat it; None where the video's isn't nearly that.

    A model's shortest video may be seconds longer.
    """
    if seconds is None or abs(float(seconds) * request.fps - request.frames) > spec.frame_step:
        return None
    return seconds


def make_image_name() -> str:
    """Return a new name for an input image in storage."""
    return f"input-{secrets.token_hex(16)}.png"
