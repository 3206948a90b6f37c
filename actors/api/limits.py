"""The limits on what clients can cost ingresses and workers; HAProxy's are in cluster/provision/haproxy.cfg."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from cluster.footprints import Footprint, build_ingress
from wan_tpu.errors import InvalidInput
from wan_tpu.storage.base import NoSpace, Storage
from wan_tpu.suggest import did_you_mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """Limits of one ingress process, or of a worker for webhooks. They apply to operators' keys, too."""

    image_bytes: int = 20_000_000  # Size of an image's file.
    video_bytes: int = 20_000_000  # Size of a video's file.
    video_pixels: int = 9_000_000  # Pixels of its frames.
    video_s: float = 60.0  # How long a video may last that is sent to be continued,
    extended_s: float = 600.0  # and how long what becomes of it, or of a video of this service.
    video_cpu_s: int = 40  # Processor time of each look at it, beside that of the process that reads it.
    video_wait_s: float = 60.0  # Wall time that this process gets in addition, for all of them in a body.
    # Bodies up to this size are parsed in the ingress itself, larger ones in a process of their own.
    small_bytes: int = 32_768
    body_s: float = 20.0  # How many seconds a body may take to arrive,
    body_rate: float = 250_000  # and one second more for every so many bytes.
    # Bytes of bodies received per second from one key. Two seconds' worth may arrive at once.
    key_rate: float = 10_000_000
    bodies: int = 32  # Bodies of one key that arrive or are read at a time.
    # Memory for all bodies together. When it is full, the key that holds most of it loses its oldest body that is still
    # arriving.
    bodies_bytes: int = 150_000_000
    readers: int = 2  # Processes that parse bodies and images, at a time.
    reader_s: float = 30.0  # Wall time of each of these.
    reader_cpu_s: int = 8  # Processor time of each.
    reader_bytes: int = 1_000_000_000  # Memory of each.
    followers: int = 100  # Streams of one key, of events and of videos that are decoded.
    # If a client takes less than 64 kB of a download in this time, the connection is closed.
    download_stall_s: float = 30.0
    # Share of the queue that the segments of one key may take, if the key has no limit of its own.
    key_share: float = 0.5
    # Bytes of the files of all jobs of one key, and of its uploads.
    key_bytes: int = 100_000_000_000
    # Rate of requests, and of segments asked for, of a key that has no limit of its own.
    requests_per_minute: float = 1200.0
    # Images fetched from other servers at a time, each into a file. One key may have a quarter of them.
    fetches: int = 32
    webhooks: int = 64  # Webhooks called at a time,
    webhooks_of_a_key: int = 4  # and of one key.
    # With less free space on the disk of a results folder, no more jobs are accepted and no segments begun, and no
    # fragments are stored.
    free_bytes: int = 500_000_000

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> "ServiceLimits":
        """Return the default limits with those changed that are given as "name=number"; raises `InvalidInput`."""
        names = {field.name for field in dataclasses.fields(cls)}
        changed: dict[str, Any] = {}
        for text in arguments:
            name, _, number = text.partition("=")
            if name not in names:
                hint = did_you_mean(name, names)
                raise InvalidInput(
                    f"--limit {text}: there is no limit {name!r}{hint}; choose from {', '.join(sorted(names))}"
                )
            kind = type(getattr(cls, name))
            try:
                changed[name] = kind(number)
            except ValueError:
                raise InvalidInput(f"--limit {text}: give a number, such as {name}={getattr(cls, name)}") from None
            if not 0 < changed[name] < math.inf:
                raise InvalidInput(f"--limit {text}: give a number above 0")
        return cls(**changed)

    def check_disk(self, storage: Storage) -> None:
        """Raise `NoSpace` if so little of the disk is left that nothing more should be begun."""
        free = storage.free()
        if free is not None and free < self.free_bytes:
            raise NoSpace(
                f"{storage.location()} has {free} bytes left, of which {self.free_bytes} are reserved; free some space"
            )

    @property
    def ingress(self) -> Footprint:
        """What an ingress takes. A reader that decodes a video starts another process with as much memory."""
        return build_ingress(self.bodies_bytes + 2 * self.readers * self.reader_bytes)

    @property
    def body_bytes(self) -> int:
        """The largest body of a request: an image or a video in base64, and texts."""
        return max(self.image_bytes, self.video_bytes) * 4 // 3 + 1_000_000
