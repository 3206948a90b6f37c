"""Parse JSON from clients strictly: RFC 8259 has no NaN."""

import json
from typing import Any, NoReturn

from wan_tpu.errors import InvalidRequest


def loads(text: str | bytes, source: str = "the body", field: str | None = None) -> Any:
    """Parse JSON; raises `InvalidRequest`, whose message names the `source`.

    Lone surrogates are accepted here. They are rejected later, with the name of their field.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except UnicodeDecodeError:
        raise InvalidRequest(f"{source}: invalid JSON (it isn't UTF-8)", field) from None
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or type(error).__name__
        raise InvalidRequest(f"{source}: invalid JSON ({reason[:80]})", field) from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
