"""Build the pods of a Ray cluster on GKE: the head, the group without TPUs, and the worker groups of slices.

Sources: docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus for node selectors; docs.ray.io, "Ray on
Kubernetes", for TPUs and probes.
"""

from collections.abc import Mapping

from cluster.chips import GIB
from cluster.errors import LayoutError
from cluster.footprints import LEADER, Footprint, count_machines
from cluster.layout import Layout
from cluster.provision import haproxy
from cluster.provision.cloud_sql import build_proxy_container
from cluster.provision.node_pools import NodePool
from cluster.provision.queued import consume_request
from cluster.provision.target import CONTAINER_SECURITY, QUEUED, Object, Target

CPU_GROUP = "cpu"
# Environment variables of every container.
ENVIRONMENT = {
    # GKE stops a spot node 15 s after announcing it, and draining must have ended by then.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "13",
    # A batch that is stopped needs time to take its pipeline down.
    "RAY_JOB_STOP_WAIT_TIME_S": "60",
} | haproxy.ENVIRONMENT
# With these variables, Ray's dashboard can trace a host: JAX's profiler listens on the port, and requires no token.
_TRACES = {"RAY_DASHBOARD_ENABLE_PROFILING": "1", "JAX_PROFILER_PORT": "9999"}
# On each node, Ray's agent answers health checks on this port without a token. The head's path also checks the GCS.
_AGENT_PORT = 52365
_HEAD_HEALTH, _WORKER_HEALTH = "/api/healthz", "/api/local_raylet_healthz"
# KubeRay's labels of a head pod, and of a pod whose HTTP proxy is healthy.
HEAD = {"ray.io/node-type": "head"}
SERVES = {"ray.io/serve": "true"}
SERVE_PORT = 8000
_USER = 1000  # The user id that the image runs as (cluster/Dockerfile).
# Disk of each pod, for logs and for objects that Ray spills; and additional disk for weights from the hub.
_DISK_GIB, _HUB_GIB = 20, 160
# The networks of Google's front ends and their health checks (docs.cloud.google.com/load-balancing/docs/health-checks).
LOAD_BALANCERS = ("35.191.0.0/16", "130.211.0.0/22")
# CPUs and memory of a pod without TPUs, and the parts of its memory for the object store and for Ray's own processes.
_CPUS, _MEMORY_GIB, _STORE_GIB, _RAY_GIB = 4, 16, 4, 1
# What such a pod has left for leaders, drivers, workers and ingresses.
_AVAILABLE = Footprint(_CPUS, (_MEMORY_GIB - _STORE_GIB - _RAY_GIB) * GIB)


def build_head_group(target: Target) -> Object:
    """Return the group of the head pod, which runs Ray's own processes, and HAProxy in a service."""
    ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "serve": SERVE_PORT, "metrics": 8080}
    # Without these probes, KubeRay before 1.6 would check health with wget, which the image doesn't have.
    container = _build_container(target, ports, cpu=_CPUS, memory=f"{_MEMORY_GIB}Gi") | _build_probes(_HEAD_HEALTH)
    # With no CPUs, Ray places nothing on the head. If an actor overloaded it, the head and all other nodes would die.
    return {
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0", **_divide_memory()},
        "template": _build_template(target, container, _build_proxy(target)),
    }


def build_cpu_group(layout: Layout, target: Target) -> Object:
    """Return the group for leaders, drivers, workers and ingresses, which aren't lost with a slice's hosts.

    Raises:
        LayoutError: A process needs more memory than a pod without TPUs has.
    """
    container = _build_container(target, {"metrics": 8080}, cpu=_CPUS, memory=f"{_MEMORY_GIB}Gi")
    container |= _build_probes(_WORKER_HEALTH)
    return {
        "groupName": CPU_GROUP,
        "replicas": 1,
        "minReplicas": 1,
        "maxReplicas": _count_cpu_pods(layout, target),
        "rayStartParams": _divide_memory(),
        "template": _build_template(target, container, _build_proxy(target)),
    }


def _count_cpu_pods(layout: Layout, target: Target) -> int:
    """Return the maximum number of pods without TPUs.

    Raises:
        LayoutError: A process needs more memory than such a pod has.
    """
    if large := [process for process in target.processes if process.memory_bytes > _AVAILABLE.memory_bytes]:
        raise LayoutError(
            f"with these limits an ingress may need {large[0].memory_bytes / GIB:.1f} GiB, but a pod without TPUs has "
            f"{_AVAILABLE.memory_bytes / GIB:g} GiB; lower --limit reader_bytes, readers or bodies_bytes"
        )
    processes = [LEADER] * layout.slices + [*target.processes]
    # While a scaling cluster is updated in place, new processes start before the old ones have ended.
    return count_machines(processes * (1 if target.is_whole else 2), _AVAILABLE)


def _divide_memory() -> dict[str, str]:
    """Return Ray's start parameters for the memory of a node without TPUs.

    By default, KubeRay gives actors the container's whole memory, which also contains the object store.
    """
    return {"memory": str(_AVAILABLE.memory_bytes), "object-store-memory": str(_STORE_GIB * GIB)}


def build_slice_groups(pool: NodePool, target: Target) -> list[Object]:
    """Return the worker groups of a kind of slice: a single group, or a group per slice if slices are requested."""
    name = pool.kind.pod_type
    if not target.requests_slices:
        return [_build_slice_group(pool, target, name, pool.slices)]
    return [_build_slice_group(pool, target, f"{name}-{number}", 1) for number in range(pool.slices)]


def _build_slice_group(pool: NodePool, target: Target, name: str, max_slices: int) -> Object:
    """Return a worker group, which starts with no slices and scales up on request."""
    kind = pool.kind
    is_small = kind.chips_per_host == 1
    container = _build_container(
        target,
        {"metrics": 8080},
        cpu=16 if is_small else 64,
        memory="32Gi" if is_small else "128Gi",
        tpu=kind.chips_per_host,
    )
    # Also select the machine type, because a slice of 2x4 chips may also consist of two machines with four chips each.
    selector = {**kind.gke_selector, "node.kubernetes.io/instance-type": pool.machine}
    tolerations = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    if target.capacity != "on-demand":
        key = f"cloud.google.com/gke-{target.capacity}"
        if target.capacity != QUEUED:  # For queued nodes, GKE documents only a taint, and no label.
            selector[key] = "true"
        tolerations.append({"key": key, "operator": "Equal", "value": "true", "effect": "NoSchedule"})
    template = _build_template(
        target, container | _build_probes(_WORKER_HEALTH), {"nodeSelector": selector, "tolerations": tolerations}
    )
    if target.requests_slices:
        template["metadata"]["annotations"] |= consume_request(target, name)
    return {
        "groupName": name,
        "replicas": 0,
        "minReplicas": 0,
        "maxReplicas": max_slices,
        "numOfHosts": kind.hosts,
        # By these labels, Ray's autoscaler knows which group fits the bundles of a slice.
        "labels": kind.host_selector,
        "rayStartParams": {"num-cpus": str(16 if is_small else 64)}
        # Ray counts device files, so state the number of chips where each chip has several.
        | ({"resources": f'"{{\\"TPU\\": {kind.chips_per_host}}}"'} if kind.chip.device_files > 1 else {}),
        "template": template,
    }


def _build_proxy(target: Target) -> Object:
    return {"initContainers": [build_proxy_container(target.cloud_sql)]} if target.cloud_sql else {}


def _build_template(target: Target, container: Object, pod_fields: Object) -> Object:
    spec: Object = {
        "serviceAccountName": target.name,
        "terminationGracePeriodSeconds": 30,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **pod_fields,
    }
    # Keep GKE's autoscaler from evicting pods to empty a machine: Ray's autoscaler decides which pods are idle.
    annotations = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    metadata = {"labels": target.labels, "annotations": annotations}
    return {"metadata": metadata, "spec": spec | {"containers": [container]}}


def _build_container(target: Target, ports: Mapping[str, int], *, cpu: int, memory: str, tpu: int = 0) -> Object:
    disk_gib = _DISK_GIB + (_HUB_GIB if tpu and target.from_hub else 0)
    requests: Object = {"cpu": str(cpu), "memory": memory}
    limits: Object = {}
    if tpu:  # The pod has its machine to itself, so CPU and memory need no limits.
        requests["google.com/tpu"] = limits["google.com/tpu"] = str(tpu)
    else:
        limits = dict(requests)
    requests["ephemeral-storage"] = f"{disk_gib}Gi"  # Set no limit, which would evict a pod that spills more.
    environment = {"ENABLE_PJRT_COMPATIBILITY": "true"} | ENVIRONMENT | (_TRACES if target.traces else {})
    if target.public:
        environment |= {"WAN_TPU_TRUSTED_PROXIES": " ".join(LOAD_BALANCERS), "WAN_TPU_FORWARDED_HOPS": "2"}
    container: Object = {
        "name": "ray",
        "image": target.image,
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": {"requests": requests, "limits": limits},
        "securityContext": CONTAINER_SECURITY,
    }
    if target.secret is not None:
        container["envFrom"] = [{"secretRef": {"name": target.secret}}]
    return container


def _build_probes(path: str) -> Object:
    """Return probes that consider a pod ready once Ray is healthy on it.

    KubeRay's own probes would wait for an HTTP proxy on a service's workers, but only the head has one.
    """
    probe = {"httpGet": {"path": path, "port": _AGENT_PORT}, "periodSeconds": 5, "timeoutSeconds": 5}
    return {
        "readinessProbe": probe | {"failureThreshold": 3},
        "livenessProbe": probe | {"initialDelaySeconds": 30, "failureThreshold": 24},
    }
