"""What a request, a key or an address can cost the service: every bound on its clients, in one place."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from wan_tpu.errors import InvalidInput
from wan_tpu.suggest import did_you_mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one ingress process, but for those of webhooks, which are a worker's. An operator's key has them too.

    image_bytes     of an image's file
    small_bytes     of a body that is taken apart where it arrives; of a larger one this is a process's work
    body_s, body_rate  for a body to arrive: so many seconds, and one more for every so many bytes
    key_rate        bytes of bodies a second that are taken of one key, of which two seconds' may come at once
    bodies          of one key that arrive, or are read, at a time
    bodies_bytes    of all of them together, in memory; where there is no room the key that holds most loses its oldest
    readers         processes that take bodies and images apart, at a time
    reader_s, reader_cpu_s, reader_bytes  time, processor's time and memory of each
    followers       event streams of one key
    download_stall_s  in which a client takes 64 kB of a download, or the connection is closed
    key_share       of the queue that jobs of one key may be, where the key has no limit of its own
    requests_per_minute  of a key that has no limit of its own
    fetches         images of other servers that are fetched at a time, each into a file; of a key a quarter of them
    webhooks        that are called at a time; webhooks_of_a_key  of them
    free_bytes      that are left on the disk of a folder of results, or nothing more is accepted
    """

    image_bytes: int = 20_000_000
    small_bytes: int = 32_768
    body_s: float = 20.0
    body_rate: float = 250_000
    key_rate: float = 10_000_000
    bodies: int = 32
    bodies_bytes: int = 150_000_000
    readers: int = 2
    reader_s: float = 30.0
    reader_cpu_s: int = 8
    reader_bytes: int = 1_000_000_000
    followers: int = 100
    download_stall_s: float = 30.0
    key_share: float = 0.5
    requests_per_minute: float = 1200.0
    fetches: int = 32
    webhooks: int = 64
    webhooks_of_a_key: int = 4
    free_bytes: int = 500_000_000

    @classmethod
    def of(cls, given: Sequence[str]) -> "Limits":
        """Return limits of which some are given as "name=number"; raises `InvalidInput`."""
        names = {field.name for field in dataclasses.fields(cls)}
        changed: dict[str, Any] = {}
        for text in given:
            name, _, number = text.partition("=")
            if name not in names:
                hint = did_you_mean(name, names)
                raise InvalidInput(
                    f"--limit {text}: there is no limit {name!r}{hint}; there are {', '.join(sorted(names))}"
                )
            kind = type(getattr(cls, name))
            try:
                changed[name] = kind(number)
            except ValueError:
                raise InvalidInput(f"--limit {text}: give a number, such as {name}={getattr(cls, name)}") from None
            if not 0 < changed[name] < math.inf:
                raise InvalidInput(f"--limit {text}: give a number above 0")
        return cls(**changed)

    @property
    def body_bytes(self) -> int:
        """How long a request's body may be: an image in base64, and texts."""
        return self.image_bytes * 4 // 3 + 1_000_000
