"""JSON from a client, read strictly: RFC 8259 has no NaN."""

import json
from typing import Any, NoReturn

from wan_tpu.errors import InvalidRequest


def loads(text: str | bytes, what: str = "the body", field: str | None = None) -> Any:
    """Return what JSON says; raises `InvalidRequest`, which names `what` was read, and its field.

    A lone half of a surrogate pair is read: who stores the text refuses it with the field's name.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except UnicodeDecodeError:
        raise InvalidRequest(f"{what}: invalid JSON (it isn't UTF-8)", field) from None
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or type(error).__name__
        raise InvalidRequest(f"{what}: invalid JSON ({reason[:80]})", field) from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
