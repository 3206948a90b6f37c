"""Read what is asked for from JSON or from the fields of a form: OpenAI's clients send a form, others JSON."""

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from actors.api.objects import CreateVideo
from wan_tpu.errors import InvalidRequest


class InvalidField(InvalidRequest):
    """A field of a body can't be used; `param` is its name, None for the body itself."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


def from_json(body: Any) -> CreateVideo:
    """Return a request from parsed JSON; raises `InvalidField`."""
    if not isinstance(body, dict):
        raise InvalidField(f"the body is a {type(body).__name__}; send a JSON object with a prompt", None)
    return _checked(body, strict=True)


def from_form(fields: Iterable[tuple[str, str]]) -> CreateVideo:
    """Return a request from a form's text fields, its file left out; raises `InvalidField`.

    An object's field is written with brackets, as OpenAI's client writes it: input_reference[image_url].
    """
    body: dict[str, Any] = {}
    for name, value in fields:
        outer, bracket, inner = name.partition("[")
        place, key = body, outer
        if bracket and inner.endswith("]"):
            place, key = body.setdefault(outer, {}), inner[:-1]
        if not isinstance(place, dict) or key in place:
            raise InvalidField(f"the field {name[:80]!r} was sent more than once; send it once", outer[:80])
        place[key] = value
    return _checked(body, strict=False)  # a form has only texts: "81" is a number


def _checked(body: dict[str, Any], *, strict: bool) -> CreateVideo:
    try:
        return CreateVideo.model_validate(body, strict=strict)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]  # without what was given: it may be a prompt
        param = ".".join(str(part) for part in first["loc"])[:80]
        if first["type"] == "extra_forbidden":
            known = ", ".join(CreateVideo.model_fields)
            raise InvalidField(f"there is no field {param!r}; there are: {known}", param) from None
        raise InvalidField(f"{param}: {first['msg']}", param) from None
