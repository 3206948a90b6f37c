"""How the service is run: plain values that its processes are given."""

import dataclasses

from actors.api.images.decoder import ImageLimits
from actors.api.outbound.client import FetchSettings
from actors.api.sizes import Size
from actors.jobs.values import JobSettings

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """What is the same for all processes of a service.

    database      path of a SQLite file, or postgresql://...; its API keys are this service's
    storage       folder or gs:// of input images and results
    model         the model's name, as clients give it
    names         while there are no keys, all jobs belong to everybody, and only requests to one of these hosts are
                  answered: other pages in a browser of this machine can't ask
    largest       sizes that the slices have memory for; anything if empty
    queue_limit   jobs that may wait; one more is answered with 429
    concurrency   jobs that one worker has in the pipeline at a time
    chips         stage -> chips of the slice that runs it, for chip-seconds
    webhook_secret_file   what webhooks are signed with, "whsec_" and base64; without it there are no webhooks
    origins       of web pages that may use the API from a browser (CORS)
    """

    database: str
    storage: str
    model: str
    names: tuple[str, ...] = LOCAL_NAMES
    largest: tuple[Size, ...] = ()
    queue_limit: int = 1000
    concurrency: int = 4
    chips: dict[str, int] = dataclasses.field(default_factory=dict)
    webhook_secret_file: str | None = None
    origins: tuple[str, ...] = ()
    images: ImageLimits = dataclasses.field(default_factory=ImageLimits)
    fetch: FetchSettings = dataclasses.field(default_factory=FetchSettings)
    jobs: JobSettings = dataclasses.field(default_factory=JobSettings)

    @property
    def webhooks(self) -> FetchSettings:
        """What may be called, of what may be fetched."""
        return dataclasses.replace(self.fetch, what="webhook")

    @property
    def body_bytes(self) -> int:
        """How long a request's body may be: an image in base64, and texts."""
        return self.images.max_bytes * 4 // 3 + 1_000_000
