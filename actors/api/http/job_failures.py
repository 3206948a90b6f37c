"""What a failed job's error code means to a client that waits for it, and to an operator."""

from typing import NamedTuple

from actors.jobs.values import (
    BROKEN_VIDEO,
    CANCELLED,
    DEADLINE,
    INPUT_LOST,
    INTERNAL_ERROR,
    INVALID,
    LOST,
    UNHEALTHY,
)


class Meaning(NamedTuple):
    """The HTTP status of the answer, and what is to blame, in words."""

    status: int
    blame: str


MEANINGS = {
    CANCELLED: Meaning(409, "whoever cancelled it"),
    DEADLINE: Meaning(408, "its deadline"),
    INVALID: Meaning(400, "the request"),
    INPUT_LOST: Meaning(503, "the storage"),
    LOST: Meaning(503, "the machines"),
    UNHEALTHY: Meaning(500, "the model: a stage computed NaN"),
    BROKEN_VIDEO: Meaning(500, "the encoder: the file can't be decoded"),
    INTERNAL_ERROR: Meaning(500, "the program: its log says why"),
}


def explain(code: str | None) -> Meaning:
    """Return what a code means; a newer worker may know other codes."""
    return MEANINGS.get(code or "", Meaning(500, code or "unknown"))
