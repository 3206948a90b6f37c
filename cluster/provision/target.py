"""The settings of a Ray cluster on GKE, on which its Kubernetes objects depend."""

from dataclasses import dataclass
from typing import Any

from cluster.footprints import Footprint

Object = dict[str, Any]

# The ways of provisioning TPU machines. With "queued", slices wait in the queue of Google's Dynamic Workload Scheduler.
QUEUED = "queued"
CAPACITIES = ("on-demand", "spot", "flex-start", QUEUED)
CONTAINER_SECURITY: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@dataclass(frozen=True)
class Target:
    """The settings of a Ray cluster on GKE."""

    name: str  # The name of the objects, to which suffixes are appended where there are several of a kind.
    namespace: str
    image: str
    ray_version: str  # The version of Ray in the image.
    account: str | None = None  # The Google service account that the pods act as, to reach buckets and Cloud SQL.
    # The name of a Secret whose keys become environment variables of all pods, such as PGPASSWORD.
    secret: str | None = None
    # The Cloud SQL instance, PROJECT:REGION:NAME, that pods without TPUs reach through Google's proxy.
    cloud_sql: str | None = None
    capacity: str = "on-demand"  # How TPU machines are provisioned, one of `CAPACITIES`.
    from_hub: bool = False  # Whether hosts download weights from the hub to their disks.
    public: bool = False  # Whether clients connect through Google's load balancer (`cluster.provision.exposure`).
    queue: str | None = None  # The Kueue local queue in which the cluster waits.
    # The kind of object that has metrics collected, PodMonitoring or PodMonitor; None for no such object.
    monitor: str | None = "PodMonitoring"
    traces: bool = False  # Whether Ray's dashboard may trace a host, for which the image needs TensorFlow.
    # The footprints of the processes without TPUs, other than the leaders of slices: ingresses, workers.
    processes: tuple[Footprint, ...] = ()
    idle_s: int = 600  # The number of seconds after which an unused slice is released.

    @property
    def is_whole(self) -> bool:
        """Whether the cluster has all of its slices from the start.

        Kueue doesn't admit a cluster that scales, and a request to Google's queue can be used only once.
        """
        return self.queue is not None or self.capacity == QUEUED

    @property
    def requests_slices(self) -> bool:
        """Whether the manifests request slices from Google's queue. With a Kueue queue, Kueue requests them."""
        return self.queue is None and self.capacity == QUEUED

    @property
    def labels(self) -> dict[str, str]:
        """The labels of all objects and pods.

        They leave `app.kubernetes.io/name` to KubeRay, whose Service of a head selects pods by that label.
        """
        return {"app.kubernetes.io/part-of": "wan-tpu", "app.kubernetes.io/instance": self.name}

    def build_object(self, api: str, kind: str, *, suffix: str | None = None, **content: Any) -> Object:
        """Return a Kubernetes object with the cluster's name (and a dash and `suffix`), namespace and labels."""
        queued = {"kueue.x-k8s.io/queue-name": self.queue} if self.queue and kind.startswith("Ray") else {}
        name = self.name if suffix is None else f"{self.name}-{suffix}"
        metadata = {"name": name, "namespace": self.namespace, "labels": self.labels | queued}
        return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}
