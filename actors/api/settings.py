"""How the service is run: plain values that its processes are given."""

import dataclasses

from actors.api.catalogue import Catalogue
from actors.api.limits import Limits
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
    aliases       other names that clients may give it: "sora-2"
    names         while there are no keys, all jobs belong to everybody, and only requests to one of these hosts are
                  answered: other pages in a browser of this machine can't ask
    catalogue     adapters that clients may name
    largest       sizes that the slices have memory for; anything if empty
    queue_limit   jobs that may wait; one more is answered with 429
    concurrency   jobs that one worker has in the pipeline at a time
    chips         stage -> chips of the slice that runs it, for chip-seconds
    dollars       stage -> what one of those chips costs an hour, where that is known
    url_s         for which a result in a bucket can be downloaded there; None: it goes through an ingress
    sync_s        that a request may wait for its video; one that isn't made by then is polled for
    webhook_secret_file   what webhooks are signed with, "whsec_" and base64; without it there are no webhooks
    origins       of web pages that may use the API from a browser (CORS)
    """

    database: str
    storage: str
    model: str
    aliases: tuple[str, ...] = ()
    names: tuple[str, ...] = LOCAL_NAMES
    catalogue: Catalogue = dataclasses.field(default_factory=Catalogue)
    largest: tuple[Size, ...] = ()
    queue_limit: int = 1000
    concurrency: int = 4
    chips: dict[str, int] = dataclasses.field(default_factory=dict)
    dollars: dict[str, float] = dataclasses.field(default_factory=dict)
    url_s: float | None = None
    sync_s: float = 120.0
    webhook_secret_file: str | None = None
    origins: tuple[str, ...] = ()
    limits: Limits = dataclasses.field(default_factory=Limits)
    fetch: FetchSettings = dataclasses.field(default_factory=FetchSettings)
    jobs: JobSettings = dataclasses.field(default_factory=JobSettings)

    @property
    def webhooks(self) -> FetchSettings:
        """What may be called, of what may be fetched."""
        return dataclasses.replace(self.fetch, what="webhook")
