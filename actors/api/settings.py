"""The service's settings, as plain values that are passed to its processes."""

import dataclasses

from actors.api.catalogue import Catalogue
from actors.api.limits import ServiceLimits
from actors.api.outbound.client import FetchSettings
from actors.api.sizes import Size
from actors.jobs.values import JobSettings
from actors.reliability import ReliabilitySettings

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Settings that all processes of a service share.

    Attributes:
        database: Path of a SQLite file, or postgresql://... It also holds the service's API keys.
        storage: Folder, or a bucket's address, of input images and results.
        model: The model's name for clients.
        aliases: Other names that clients may use, such as "sora-2".
        names: Host names that requests must use as long as there are no keys. All jobs then belong to everybody, and
            this keeps other sites' pages, open in a browser on this machine, from using the service.
        catalogue: Adapters that clients may name.
        largest: Sizes that fit the slices' memory; if empty, any size does.
        queue_limit: How many segments may wait; most videos have one. Further videos are answered with 429.
        concurrency: How many jobs a worker has in the pipeline at a time.
        chips: Number of chips of the slice that runs a stage, for chip-seconds.
        dollars: Price per hour of one of those chips, by stage, where known.
        url_s: How long a signed URL of a result in a bucket is valid; None to send results through an ingress.
        webhook_secret_file: File with the key that signs webhooks, "whsec_" and base64. Without it there are no
            webhooks.
        origins: Origins of web pages that may use the API from a browser (CORS).
        limits: Limits on clients.
        fetch: Which images may be fetched from other servers.
        jobs: How long jobs and files are kept.
        reliability: Time-outs and retries, the same as the pipeline's.
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
    webhook_secret_file: str | None = None
    origins: tuple[str, ...] = ()
    limits: ServiceLimits = dataclasses.field(default_factory=ServiceLimits)
    fetch: FetchSettings = dataclasses.field(default_factory=FetchSettings)
    jobs: JobSettings = dataclasses.field(default_factory=JobSettings)
    reliability: ReliabilitySettings = dataclasses.field(default_factory=ReliabilitySettings)

    @property
    def webhooks(self) -> FetchSettings:
        """Which webhooks may be called: the same servers that images may be fetched from."""
        return dataclasses.replace(self.fetch, subject="webhook")
