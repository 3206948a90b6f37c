"""Kubernetes objects that run a layout on GKE: Ray clusters, services and jobs for KubeRay 1.5 and later.

Each kind of slice is a worker group: KubeRay creates its pods in whole slices, GKE's TPU webhook tells each pod its
place in the slice, and Ray's autoscaler launches slices for the bundles that leaders request. Leaders and HTTP run in a
group without TPUs.

Sources: KubeRay's schemas of ray.io/v1; docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus for node
selectors; docs.ray.io, "Ray on Kubernetes", for TPUs, probes and token authentication.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import LayoutError
from cluster.layout import Layout
from cluster.provision.haproxy import FORWARDED_HOPS, TRUSTED_PROXIES
from cluster.readable_yaml import dump_yaml
from cluster.slice_spec import SliceSpec

Object = dict[str, Any]

API = "ray.io/v1"
CPU_GROUP = "cpu"
# Environment variables of every container.
ENVIRONMENT = {
    # GKE takes a spot node away 15 s after its notice, so draining must have ended by then.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "13",
    "RAY_JOB_STOP_WAIT_TIME_S": "60",  # A stopped job takes its pipeline down.
    # See docs/serving.md for these.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
}
# These let Ray's dashboard trace a host: JAX's profiler listens on the port, and asks for no token.
_TRACES = {"RAY_DASHBOARD_ENABLE_PROFILING": "1", "JAX_PROFILER_PORT": "9999"}
# Ray's agent on each node answers both on this port, and asks for no token. The head's path also checks the GCS.
_AGENT_PORT = 52365
_HEAD_HEALTH, _WORKER_HEALTH = "/api/healthz", "/api/local_raylet_healthz"
# The labels by which KubeRay marks a head, and a pod whose HTTP proxy answers.
HEAD = {"ray.io/node-type": "head"}
SERVES = {"ray.io/serve": "true"}
SERVE_PORT = 8000
_USER = 1000  # The user of the image (cluster/Dockerfile).
# The disk of a pod, for logs and objects that Ray spills; and the disk for the weights of a model from the hub.
_DISK_GIB, _HUB_GIB = 20, 160
# Objects that collect a pod's metrics, by kind: for GKE's own managed Prometheus, or for the Prometheus operator.
MONITORS = {"PodMonitoring": "monitoring.googleapis.com/v1", "PodMonitor": "monitoring.coreos.com/v1"}
# The networks of Google's front ends and their health checks (docs.cloud.google.com/load-balancing/docs/health-checks).
LOAD_BALANCERS = ("35.191.0.0/16", "130.211.0.0/22")
_CONTAINER_SECURITY: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_LEADERS_A_CPU = 10  # Leaders, like other small actors, take 0.1 CPU each.
_CPUS = 4  # How many CPUs a pod without TPUs has.


@dataclass(frozen=True)
class Target:
    """Where and how a Ray cluster runs.

    Attributes:
        name: The name of the objects.
        namespace: Their namespace.
        image: The container image.
        ray_version: The version of Ray in the image.
        account: The Google service account that the pods act as, to reach buckets.
        secret: The name of a Secret whose keys are environment variables of all pods (PGPASSWORD).
        capacity: How TPU machines are provisioned: "on-demand", "spot" or "flex-start".
        from_hub: Whether hosts download weights from the hub onto their disks.
        public: Whether clients come through Google's load balancer (`cluster.provision.exposure`).
        queue: The Kueue local queue in which the cluster waits. Such a cluster has all its slices from the start, since
            Kueue admits none that scales.
        monitor: Which of `MONITORS` collects metrics; None for none.
        traces: Whether Ray's dashboard may trace a host, for which the image needs TensorFlow.
        idle_s: After how many seconds an unused slice is released.
    """

    name: str
    namespace: str
    image: str
    ray_version: str
    account: str | None = None
    secret: str | None = None
    capacity: str = "on-demand"
    from_hub: bool = False
    public: bool = False
    queue: str | None = None
    monitor: str | None = "PodMonitoring"
    traces: bool = False
    idle_s: int = 600

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


def ray_cluster(layout: Layout, target: Target) -> Object:
    """Return the spec of a Ray cluster.

    Raises:
        LayoutError: GKE has no machines for a kind of slice, or the layout is for emulated slices.
    """
    if layout.devices_per_host is not None:
        raise LayoutError(f"{layout.source}: its slices are emulated; take out emulate, or give a layout of real ones")
    kinds: dict[str, tuple[SliceSpec, int]] = {}
    for pool in layout.pools:
        kind, most = kinds.get(pool.slice.pod_type, (pool.slice, 0))
        kinds[kind.pod_type] = kind, most + pool.replicas.maximum
    groups = [
        _cpu_group(layout, target),
        *(_slice_group(kind, most, target, layout.source) for kind, most in kinds.values()),
    ]
    scaling: Object = {
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "version": "v2",
            "idleTimeoutSeconds": target.idle_s,
            "securityContext": _CONTAINER_SECURITY,
        },
    }
    if target.queue is not None:
        groups = [group | dict.fromkeys(("replicas", "minReplicas"), group["maxReplicas"]) for group in groups]
    return {
        "rayVersion": target.ray_version,
        **({} if target.queue is not None else scaling),
        "authOptions": {"mode": "token"},
        "headGroupSpec": _head(target),
        "workerGroupSpecs": groups,
    }


def supporting(target: Target, *, http: bool) -> dict[str, Object]:
    """Return what stands beside a cluster, each with a comment: its account, who may reach it, what may evict it.

    Args:
        target: Where it runs.
        http: Whether it answers on port 8000.
    """
    annotations = {"iam.gke.io/gcp-service-account": target.account} if target.account else {}
    account = target.object("v1", "ServiceAccount")
    account["metadata"] |= {"annotations": annotations} if annotations else {}
    objects = {"the pods' identity at Google Cloud": account, **_network_policy(target, http=http)}
    for name, pods in (("head", HEAD), (CPU_GROUP, {"ray.io/group": CPU_GROUP})):
        # Only a whole number of pods works: what owns them, a RayCluster, has no scale of its own.
        spec = {"minAvailable": 1, "selector": {"matchLabels": target.labels | pods}}
        budget = target.object("policy/v1", "PodDisruptionBudget", suffix=name, spec=spec)
        objects[f"a node is drained only once another pod has taken over from its {name} pod"] = budget
    if target.monitor is not None:
        endpoints = "endpoints" if target.monitor == "PodMonitoring" else "podMetricsEndpoints"
        spec = {"selector": {"matchLabels": target.labels}, endpoints: [{"port": "metrics", "interval": "30s"}]}
        objects["Ray's metrics on each pod, for Prometheus"] = target.object(
            MONITORS[target.monitor], target.monitor, spec=spec
        )
    return objects


def _network_policy(target: Target, *, http: bool) -> dict[str, Object]:
    pods = {"matchLabels": target.labels}
    # KubeRay's operator, wherever it runs, needs the dashboard's port, which asks for the cluster's token.
    doors: list[int] = [8265, *([SERVE_PORT] if http else [])]
    ingress: list[Object] = [
        {"from": [{"podSelector": pods}]},
        {"from": [{"namespaceSelector": {}}], "ports": [{"port": port, "protocol": "TCP"} for port in doors]},
        {"ports": [{"port": 8080, "protocol": "TCP"}]},
    ]
    comment = "who reaches the pods: themselves, KubeRay's operator, clients of the service, what collects metrics"
    if target.public:
        blocks = [{"ipBlock": {"cidr": cidr}} for cidr in LOAD_BALANCERS]
        ingress.append({"from": blocks, "ports": [{"port": SERVE_PORT, "protocol": "TCP"}]})
        comment += ", and\nGoogle's front ends, which also check its health"
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress}
    return {comment: target.object("networking.k8s.io/v1", "NetworkPolicy", spec=spec)}


def service(layout: Layout, target: Target, config: str) -> Object:
    """Return a RayService with Serve's configuration, a YAML text."""
    spec = {"serveConfigV2": config, "rayClusterConfig": ray_cluster(layout, target)}
    return target.object(API, "RayService", spec=spec)


def job(layout: Layout, target: Target, entrypoint: str) -> Object:
    """Return a RayJob, whose cluster is deleted when the job has ended."""
    spec = {
        "entrypoint": entrypoint,
        "submissionMode": "HTTPMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 300,
        "rayClusterSpec": ray_cluster(layout, target),
    }
    return target.object(API, "RayJob", spec=spec)


def cluster(layout: Layout, target: Target) -> Object:
    """Return a RayCluster, for `wan-tpu submit`, `pipeline` and `serve`."""
    return target.object(API, "RayCluster", spec=ray_cluster(layout, target))


def as_yaml(objects: Mapping[str, Object]) -> str:
    """Return objects as documents of one YAML text, each below its key as a comment."""
    documents = []
    for comment, content in objects.items():
        lines = "".join(f"# {line}\n" for line in comment.splitlines())
        documents.append(lines + dump_yaml(content))
    return "---\n".join(documents)


# ---- pods


def _head(target: Target) -> Object:
    ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "serve": SERVE_PORT, "metrics": 8080}
    # Without these probes, KubeRay before 1.6 would run wget, which the image doesn't have.
    container = _container(target, ports, cpu=4, memory="16Gi") | _probes(_HEAD_HEALTH)
    # Ray places nothing on the head: if something overloaded it, the head would die, and all other nodes with it.
    return {
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
        "template": _template(target, container, {}),
    }


def _cpu_group(layout: Layout, target: Target) -> Object:
    """Return the group for leaders, drivers, workers and ingresses; on a TPU host they would be lost with its slice."""
    container = _container(target, {"metrics": 8080}, cpu=_CPUS, memory="16Gi") | _probes(_WORKER_HEALTH)
    actors = layout.slices + 10
    return {
        "groupName": CPU_GROUP,
        "replicas": 1,
        "minReplicas": 1,
        "maxReplicas": 1 + math.ceil(actors / (_CPUS * _LEADERS_A_CPU)),
        "rayStartParams": {},
        "template": _template(target, container, {}),
    }


def _slice_group(kind: SliceSpec, most: int, target: Target, source: str) -> Object:
    """Return the group of a kind of slice, which has none at first, and up to `most` on request."""
    machine = kind.chip.gke_machines.get(kind.chips_per_host)
    if machine is None:
        known = ", ".join(kind.chip.gke_machines.values()) or "none"
        raise LayoutError(f"{source}: GKE has no machine for a {kind}; for {kind.chip.name} it has {known}")
    small = kind.chips_per_host == 1
    container = _container(
        target, {"metrics": 8080}, cpu=16 if small else 64, memory="32Gi" if small else "128Gi", tpu=kind.chips_per_host
    )
    # Select the machine type too, because a slice of 2x4 chips may also be two machines of four.
    selector = {**kind.gke_selector, "node.kubernetes.io/instance-type": machine}
    tolerations = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    if target.capacity != "on-demand":
        key = f"cloud.google.com/gke-{target.capacity}"
        selector[key] = "true"
        tolerations.append({"key": key, "operator": "Equal", "value": "true", "effect": "NoSchedule"})
    return {
        "groupName": kind.pod_type,
        "replicas": 0,
        "minReplicas": 0,
        "maxReplicas": most,
        "numOfHosts": kind.hosts,
        # These labels tell Ray's autoscaler on which group a slice's bundles fit.
        "labels": kind.host_selector,
        "rayStartParams": {"num-cpus": str(16 if small else 64)}
        # Ray counts device files, so the number of chips is given here if a chip has several.
        | ({"resources": f'"{{\\"TPU\\": {kind.chips_per_host}}}"'} if kind.chip.device_files > 1 else {}),
        "template": _template(
            target, container | _probes(_WORKER_HEALTH), {"nodeSelector": selector, "tolerations": tolerations}
        ),
    }


def _template(target: Target, container: Object, more: Object) -> Object:
    spec: Object = {
        "serviceAccountName": target.name,
        "terminationGracePeriodSeconds": 30,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **more,
    }
    # GKE's autoscaler would move pods to empty a machine, but Ray's autoscaler decides which pods are idle.
    annotations = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    metadata = {"labels": target.labels, "annotations": annotations}
    return {"metadata": metadata, "spec": spec | {"containers": [container]}}


def _container(target: Target, ports: Mapping[str, int], *, cpu: int, memory: str, tpu: int = 0) -> Object:
    disk_gib = _DISK_GIB + (_HUB_GIB if tpu and target.from_hub else 0)
    requests: Object = {"cpu": str(cpu), "memory": memory}
    limits: Object = {}
    if tpu:  # The pod is alone on its machine, so CPU and memory need no limit.
        requests["google.com/tpu"] = limits["google.com/tpu"] = str(tpu)
    else:
        limits = dict(requests)
    requests["ephemeral-storage"] = f"{disk_gib}Gi"  # Without a limit: a pod that spills more isn't evicted for it.
    environment = {"ENABLE_PJRT_COMPATIBILITY": "true"} | ENVIRONMENT | (_TRACES if target.traces else {})
    if target.public:
        environment |= {TRUSTED_PROXIES: " ".join(LOAD_BALANCERS), FORWARDED_HOPS: "2"}
    container: Object = {
        "name": "ray",
        "image": target.image,
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": {"requests": requests, "limits": limits},
        "securityContext": _CONTAINER_SECURITY,
    }
    if target.secret is not None:
        container["envFrom"] = [{"secretRef": {"name": target.secret}}]
    return container


def _probes(path: str) -> Object:
    """Return probes by which a pod is ready once Ray is healthy on it.

    In a service's workers KubeRay's own would wait for an HTTP proxy, which only the head has.
    """
    probe = {"httpGet": {"path": path, "port": _AGENT_PORT}, "periodSeconds": 5, "timeoutSeconds": 5}
    return {
        "readinessProbe": probe | {"failureThreshold": 3},
        "livenessProbe": probe | {"initialDelaySeconds": 30, "failureThreshold": 24},
    }
