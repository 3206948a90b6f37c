"""Settings of a Ray cluster on GKE that its Kubernetes objects depend on."""

from dataclasses import dataclass
from typing import Any

from cluster.footprints import Footprint

Object = dict[str, Any]

# How TPU machines may be provisioned. "queued" waits in the queue of Google's Dynamic Workload Scheduler.
QUEUED = "queued"
CAPACITIES = ("on-demand", "spot", "flex-start", QUEUED)
CONTAINER_SECURITY: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@dataclass(frozen=True)
class Target:
    """A Ray cluster's place and settings on GKE.

    Attributes:
        name: The name of the objects.
        namespace: Their namespace.
        image: The container image.
        ray_version: The version of Ray in the image.
        account: The Google service account that the pods act as, to reach buckets and Cloud SQL.
        secret: The name of a Secret whose keys are environment variables of all pods (PGHOST, PGPASSWORD).
        cloud_sql: The Cloud SQL instance, PROJECT:REGION:NAME, that pods without TPUs reach through its proxy.
        capacity: How TPU machines are provisioned, one of `CAPACITIES`.
        from_hub: Whether hosts download weights from the hub onto their disks.
        public: Whether clients come through Google's load balancer (`cluster.provision.exposure`).
        queue: The Kueue local queue in which the cluster waits.
        monitor: The kind of object that has metrics collected, PodMonitoring or PodMonitor; None for none.
        traces: Whether Ray's dashboard may trace a host, for which the image needs TensorFlow.
        processes: What processes without TPUs take, other than the leaders of slices: ingresses, workers.
        idle_s: After how many seconds an unused slice is released.
    """

    name: str
    namespace: str
    image: str
    ray_version: str
    account: str | None = None
    secret: str | None = None
    cloud_sql: str | None = None
    capacity: str = "on-demand"
    from_hub: bool = False
    public: bool = False
    queue: str | None = None
    monitor: str | None = "PodMonitoring"
    traces: bool = False
    processes: tuple[Footprint, ...] = ()
    idle_s: int = 600

    @property
    def is_whole(self) -> bool:
        """Whether a cluster has all its slices from the start.

        Kueue admits no cluster that scales, and what has been requested from Google's queue can't be requested again.
        """
        return self.queue is not None or self.capacity == QUEUED

    @property
    def requests_slices(self) -> bool:
        """Whether slices are requested from Google's queue here, and not by Kueue."""
        return self.queue is None and self.capacity == QUEUED

    @property
    def labels(self) -> dict[str, str]:
        """The labels of all objects and pods.

        A pod's `app.kubernetes.io/name` stays KubeRay's own, because KubeRay's services for a head select by it.
        """
        return {"app.kubernetes.io/part-of": "wan-tpu", "app.kubernetes.io/instance": self.name}

    def object(self, api: str, kind: str, *, suffix: str | None = None, **content: Any) -> Object:
        """Return an object with the target's name, and a suffix if there are several of a kind."""
        queued = {"kueue.x-k8s.io/queue-name": self.queue} if self.queue and kind.startswith("Ray") else {}
        name = self.name if suffix is None else f"{self.name}-{suffix}"
        metadata = {"name": name, "namespace": self.namespace, "labels": self.labels | queued}
        return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}
