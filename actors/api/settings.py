"""The service's settings, as plain values that are passed to its processes."""

import dataclasses

from actors.api.catalogue import Catalogue
from actors.api.limits import ServiceLimits
from actors.api.outbound.addresses import LOCAL
from actors.api.outbound.client import FetchSettings
from actors.api.sizes import Size
from actors.jobs.values import JobSettings
from actors.reliability import ReliabilitySettings

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Settings that all processes of a service share."""

    database: str  # Path of a SQLite file, or postgresql://... It also holds the service's API keys.
    storage: str  # Folder, or a bucket's address, of input images and results.
    model: str  # The model's name for clients.
    aliases: tuple[str, ...] = ()  # Other names that clients may use, such as "sora-2".
    # Host names that requests must use as long as there are no keys. All jobs then belong to everybody, and this keeps
    # other sites' pages, open in a browser on this machine, from using the service.
    names: tuple[str, ...] = LOCAL_NAMES
    catalogue: Catalogue = dataclasses.field(default_factory=Catalogue)  # Adapters that clients may name.
    largest: tuple[Size, ...] = ()  # Sizes that fit the slices' memory; if empty, any size does.
    queue_limit: int = 1000  # How many segments may wait; most videos have one. Further videos are answered with 429.
    concurrency: int = 4  # How many jobs a worker has in the pipeline at a time.
    # Number of chips of the slice that runs a stage, for chip-seconds.
    chips: dict[str, int] = dataclasses.field(default_factory=dict)
    # Price per hour of one of those chips, by stage, where known.
    dollars: dict[str, float] = dataclasses.field(default_factory=dict)
    # How long a signed URL of a result in a bucket is valid; None to send results through an ingress.
    url_s: float | None = None
    # File with the key that signs webhooks, "whsec_" and base64. Without it there are no webhooks.
    webhook_secret_file: str | None = None
    local_webhooks: bool = False  # Whether webhooks may be on this machine and in private networks, over http, too.
    origins: tuple[str, ...] = ()  # Origins of web pages that may use the API from a browser (CORS).
    limits: ServiceLimits = dataclasses.field(default_factory=ServiceLimits)
    # Which images may be fetched from other servers.
    fetch: FetchSettings = dataclasses.field(default_factory=FetchSettings)
    jobs: JobSettings = dataclasses.field(default_factory=JobSettings)  # How long jobs and files are kept.
    # Time-outs and retries, the same as the pipeline's.
    reliability: ReliabilitySettings = dataclasses.field(default_factory=ReliabilitySettings)

    @property
    def webhooks(self) -> FetchSettings:
        """Which webhooks may be called: on servers that images may be fetched from, and perhaps on local ones."""
        return dataclasses.replace(self.fetch, subject="webhook", local=LOCAL if self.local_webhooks else ())
