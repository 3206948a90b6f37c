"""What a stage's stream carries beside spans: small facts and tickets, never a payload."""

from dataclasses import dataclass
from typing import Any

from actors.exchange import Ticket
from actors.timeline import Span


@dataclass(frozen=True)
class Prepared:
    """A request's inputs are on the devices: nobody needs the objects any more.

    seconds  that it took from the object store to the devices; nbytes  of all objects
    """

    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Handed:
    """What a stage has made: the ticket of a payload, and when that was ready.

    step  how many denoising steps are done; note  small values, such as warnings
    """

    ticket: Ticket
    ready_s: float
    step: int | None = None
    note: Any = None


Event = Span | Prepared | Handed
