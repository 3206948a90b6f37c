"""How the service is run: plain values that its processes are given."""

import dataclasses

from actors.api.fetch import FetchSettings
from actors.api.images import ImageLimits
from actors.api.memory import Memory, Sizes
from actors.jobs.rows import Keeping
from actors.jobs.work import LeaseSettings

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """What is the same for all processes of a service.

    database      path of a SQLite file, or postgresql://...
    storage       folder or gs:// of input images and results
    model         the model's name, as clients give it
    keys_file     file of API keys; keys_text: the content of one besides; without both, all jobs belong to everybody,
                  and only requests to one of `names` are answered: other pages in a browser of this machine can't ask
    room          what the slices have memory for, as a person has said or as it was derived; anything if None
    queue_limit   jobs that may wait; one more is answered with 429
    concurrency   jobs that one worker has in the pipeline at a time
    chips         stage -> chips of the slice that runs it, for chip-seconds
    webhook_secret_file   what webhooks are signed with, "whsec_" and base64; without it there are no webhooks
    origins       of web pages that may use the API from a browser (CORS)
    """

    database: str
    storage: str
    model: str
    keys_file: str | None = None
    keys_text: str | None = None
    names: tuple[str, ...] = LOCAL_NAMES
    room: Memory | Sizes | None = None
    queue_limit: int = 1000
    concurrency: int = 4
    chips: dict[str, int] = dataclasses.field(default_factory=dict)
    webhook_secret_file: str | None = None
    origins: tuple[str, ...] = ()
    images: ImageLimits = dataclasses.field(default_factory=ImageLimits)
    fetch: FetchSettings = dataclasses.field(default_factory=FetchSettings)
    keeping: Keeping = dataclasses.field(default_factory=Keeping)
    leases: LeaseSettings = dataclasses.field(default_factory=LeaseSettings)

    @property
    def with_keys(self) -> bool:
        """Whether a request needs a key."""
        return self.keys_file is not None or bool(self.keys_text)

    @property
    def body_bytes(self) -> int:
        """How long a request's body may be: an image in base64, and texts."""
        return self.images.max_bytes * 4 // 3 + 1_000_000
