"""What a client asks for, made a job that can be accepted: its request planned, its images in the video's size."""

import dataclasses
import secrets
from typing import Any

from actors.api.http.access import Caller
from actors.api.http.bodies import ParsedBody, image_of
from actors.api.http.error_answers import HttpError
from actors.api.intake.create_video import adapters_of, generation_request
from actors.api.intake.fair_semaphore import Work
from actors.api.intake.reader import Reader
from actors.api.intake.receiving import Arriving
from actors.api.intake.references import IMAGE, IMAGES, LAST
from actors.api.outbound.client import FetchError, check_url
from actors.api.settings import ServiceSettings
from actors.api.sizes import check_size
from actors.jobs.tables import Job
from wan_tpu.errors import InvalidRequest
from wan_tpu.request import IMAGES as PICTURES
from wan_tpu.request import GenerationRequest, ResolvedRequest
from wan_tpu.spec import ModelSpec

# How large the file of an image was, in a job's request.
_SIZES = {IMAGE: "input_size", LAST: "last_frame_size"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Planned:
    """A request with nothing left open, and what a job keeps of its plan."""

    request: GenerationRequest
    resolved: ResolvedRequest
    loras: list[dict[str, Any]]
    skipped_steps: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A job that isn't accepted yet, and its input images."""

    job: Job
    webhook_url: str | None
    pngs: list[bytes]


class Drafts:
    """Makes jobs of what clients ask for, and refuses what can't be made."""

    def __init__(self, settings: ServiceSettings, spec: ModelSpec, reader: Reader, work: Work) -> None:
        self._settings, self._spec, self._reader, self._work = settings, spec, reader, work

    async def draft(self, asked: ParsedBody, held: Arriving, caller: Caller) -> Draft:
        """Return the job that a body asks for, and the pictures that it begins with; raises `InvalidRequest`."""
        fields, spec, owner = asked.fields, self._spec, caller.owner
        plan = await self._work.run(owner, self._plan, asked, caller)
        follows = asked.has(IMAGE) and plan.request.height is None and spec.follows_image
        pngs: list[bytes] = []
        sizes: dict[str, str] = {}
        for name in IMAGES:
            async with image_of(asked, name, held, self._reader, self._settings.fetch) as found:
                if found is None:
                    continue
                reading, there = found
                if follows and name == IMAGE:  # only now is there a size
                    plan = await self._work.run(owner, self._plan_for, plan.request, asked, reading.sizes[there])
                height, width = plan.resolved.height, plan.resolved.width
                png = await reading.picture(height, width, slack=spec.shape_slack, name=there, count=held.add)
                pngs.append(png)
                sizes[_SIZES[name]] = "{1}x{0}".format(*reading.sizes[there])
        job = Job(
            owner=owner,
            model=self._settings.model,
            request={name: value for name, value in plan.resolved.to_json().items() if name not in PICTURES}
            | {"model": self._settings.model, "seconds": fields.seconds, "loras": plan.loras}
            | {"skipped": plan.skipped_steps}
            | sizes,
            input_image=image_name() if _SIZES[IMAGE] in sizes else None,
            input_last_image=image_name() if _SIZES[LAST] in sizes else None,
            priority=fields.priority,
            deadline=fields.deadline,
            body_digest=asked.digest,
        )
        return Draft(job=job, webhook_url=fields.webhook_url, pngs=pngs)

    def _plan(self, asked: ParsedBody, caller: Caller) -> _Planned:
        """Return what a body asks of the model; raises `InvalidRequest`, `HttpError`. Takes a core for a while."""
        fields, catalogue = asked.fields, self._settings.catalogue
        self._check_model(fields.model)
        if fields.priority > caller.priority:
            message = f"priority is {fields.priority}; this key may ask for at most {caller.priority}"
            raise HttpError(403, message, code="priority_not_allowed", param="priority")
        self._check_webhook(fields.webhook_url)
        request = generation_request(fields, self._spec, catalogue, seed=secrets.randbelow(2**31))
        return self._plan_for(request, asked, None)

    def _plan_for(self, request: GenerationRequest, asked: ParsedBody, picture: tuple[int, int] | None) -> _Planned:
        """Return a request's plan; picture: (height, width) of its image, once that is known."""
        image, last, spec = asked.has(IMAGE), asked.has(LAST), self._spec
        resolved = spec.plan(request, image=image, last=last, picture=picture).request
        follows = image and request.height is None and spec.follows_image
        if picture is not None or not follows:
            check_size(resolved, self._settings.largest, spec.frame_step)
        loras = adapters_of(asked.fields, spec, self._settings.catalogue)  # by name: where they lie may change
        return _Planned(request=request, resolved=resolved, loras=loras, skipped_steps=spec.skipped_steps(resolved))

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


def image_name() -> str:
    """Return a new name for an input image in storage."""
    return f"input-{secrets.token_hex(16)}.png"
