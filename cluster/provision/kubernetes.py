"""Kubernetes objects that run a layout on GKE: Ray clusters, services and jobs for KubeRay 1.5 and later.

Each kind of slice is a worker group: KubeRay creates its pods in whole slices, GKE's TPU webhook tells each pod its
place in the slice, and Ray's autoscaler launches slices for the bundles that leaders request. Leaders and HTTP run in a
group without TPUs.

Sources: KubeRay's schemas of ray.io/v1; docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus for node
selectors; docs.ray.io, "Ray on Kubernetes", for TPUs, probes and token authentication.
"""

from collections.abc import Mapping

from cluster.chips import GIB
from cluster.errors import LayoutError
from cluster.footprints import LEADER, Footprint, count_machines
from cluster.layout import Layout
from cluster.provision.cloud_sql import run_proxy
from cluster.provision.haproxy import FORWARDED_HOPS, TRUSTED_PROXIES
from cluster.provision.node_pools import NodePool, list_node_pools
from cluster.provision.queued import consume_request
from cluster.provision.target import CONTAINER_SECURITY, QUEUED, Object, Target
from cluster.readable_yaml import dump_yaml

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
LAYOUT_FILE = "/etc/wan-tpu/layout.yaml"  # The file in pods that has the layout of their job or service.
_USER = 1000  # The user of the image (cluster/Dockerfile).
# The disk of a pod, for logs and objects that Ray spills; and the disk for the weights of a model from the hub.
_DISK_GIB, _HUB_GIB = 20, 160
# Objects that collect a pod's metrics, by kind: for GKE's own managed Prometheus, or for the Prometheus operator.
MONITORS = {"PodMonitoring": "monitoring.googleapis.com/v1", "PodMonitor": "monitoring.coreos.com/v1"}
# The networks of Google's front ends and their health checks (docs.cloud.google.com/load-balancing/docs/health-checks).
LOAD_BALANCERS = ("35.191.0.0/16", "130.211.0.0/22")
# A pod without TPUs: its CPUs and its memory, of which Ray's object store, and Ray's own processes, get a part.
_CPUS, _MEMORY_GIB, _STORE_GIB, _RAY_GIB = 4, 16, 4, 1
_OFFERED = Footprint(_CPUS, (_MEMORY_GIB - _STORE_GIB - _RAY_GIB) * GIB)


def ray_cluster(layout: Layout, target: Target) -> Object:
    """Return the spec of a Ray cluster.

    Raises:
        LayoutError: GKE has no machines for a kind of slice, or the layout is for emulated slices.
    """
    groups = [
        _cpu_group(layout, target),
        *(group for pool in list_node_pools(layout) for group in _build_groups(pool, target)),
    ]
    scaling: Object = {
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "version": "v2",
            "idleTimeoutSeconds": target.idle_s,
            "securityContext": CONTAINER_SECURITY,
        },
    }
    if target.is_whole:
        groups = [group | dict.fromkeys(("replicas", "minReplicas"), group["maxReplicas"]) for group in groups]
    return {
        "rayVersion": target.ray_version,
        **({} if target.is_whole else scaling),
        "authOptions": {"mode": "token"},
        "headGroupSpec": _head(target),
        "workerGroupSpecs": groups,
    }


def supporting(target: Target, *, http: bool) -> dict[str, Object]:
    """Return the objects beside a cluster, each with a comment: its account, network policies, disruption budget.

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
    """Return a RayService.

    Args:
        layout: The layout.
        target: Where it runs.
        config: Serve's configuration, a YAML text; the layout is in the file `LAYOUT_FILE`, from `build_layout_map`.
    """
    spec = {"serveConfigV2": config, "rayClusterConfig": _mount_layout(ray_cluster(layout, target), target)}
    return target.object(API, "RayService", spec=spec)


def job(layout: Layout, target: Target, entrypoint: str) -> Object:
    """Return a RayJob, whose cluster is deleted when the job has ended.

    Args:
        layout: The layout.
        target: Where it runs.
        entrypoint: What the head runs; the layout is in the file `LAYOUT_FILE`, from `build_layout_map`.
    """
    spec = {
        "entrypoint": entrypoint,
        "submissionMode": "HTTPMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 300,
        "rayClusterSpec": _mount_layout(ray_cluster(layout, target), target),
    }
    return target.object(API, "RayJob", spec=spec)


def build_layout_map(target: Target, text: str) -> Object:
    """Return the ConfigMap with the layout of a job or a service, the text of a file."""
    return target.object("v1", "ConfigMap", suffix="layout", data={LAYOUT_FILE.rpartition("/")[2]: text})


def _mount_layout(cluster: Object, target: Target) -> Object:
    """Return a cluster whose pods all have the layout as a file: Serve may build an application on any of them."""
    folder, _, _ = LAYOUT_FILE.rpartition("/")
    name = build_layout_map(target, "")["metadata"]["name"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        pod["volumes"] = [{"name": "layout", "configMap": {"name": name}}]
        # A subPath would be simpler to read, but Kubernetes doesn't update files that are mounted by one.
        pod["containers"][0]["volumeMounts"] = [{"name": "layout", "mountPath": folder, "readOnly": True}]
    return cluster


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
    container = _container(target, ports, cpu=_CPUS, memory=f"{_MEMORY_GIB}Gi") | _probes(_HEAD_HEALTH)
    # Ray places nothing on the head: if something overloaded it, the head would die, and all other nodes with it.
    return {
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0", **_divide_memory()},
        "template": _template(target, container, _build_proxy(target)),
    }


def _cpu_group(layout: Layout, target: Target) -> Object:
    """Return the group for leaders, drivers, workers and ingresses; on a TPU host they would be lost with its slice."""
    container = _container(target, {"metrics": 8080}, cpu=_CPUS, memory=f"{_MEMORY_GIB}Gi") | _probes(_WORKER_HEALTH)
    return {
        "groupName": CPU_GROUP,
        "replicas": 1,
        "minReplicas": 1,
        "maxReplicas": _count_cpu_pods(layout, target),
        "rayStartParams": _divide_memory(),
        "template": _template(target, container, _build_proxy(target)),
    }


def _count_cpu_pods(layout: Layout, target: Target) -> int:
    """Return how many pods without TPUs there may be."""
    if large := [process for process in target.processes if process.memory_bytes > _OFFERED.memory_bytes]:
        raise LayoutError(
            f"an ingress may take {large[0].memory_bytes / GIB:.1f} GiB by its limits, and a pod without TPUs offers "
            f"{_OFFERED.memory_bytes / GIB:g}; lower --limit reader_bytes, readers or bodies_bytes"
        )
    processes = [LEADER] * layout.slices + [*target.processes]
    # While a cluster that scales is updated in place, new processes start before the old ones have ended.
    return count_machines(processes * (1 if target.is_whole else 2), _OFFERED)


def _divide_memory() -> dict[str, str]:
    """Return Ray's parameters of a node without TPUs.

    KubeRay would offer the container's whole memory to actors, although the object store is in it.
    """
    return {"memory": str(_OFFERED.memory_bytes), "object-store-memory": str(_STORE_GIB * GIB)}


def _build_groups(pool: NodePool, target: Target) -> list[Object]:
    """Return the worker groups of a kind of slice: one, or one for each slice if each has its own request."""
    name = pool.kind.pod_type
    if not target.requests_slices:
        return [_slice_group(pool, target, name, pool.slices)]
    return [_slice_group(pool, target, f"{name}-{number}", 1) for number in range(pool.slices)]


def _slice_group(pool: NodePool, target: Target, name: str, most: int) -> Object:
    """Return a group of slices of a kind, which has none at first, and up to `most` on request."""
    kind = pool.kind
    small = kind.chips_per_host == 1
    container = _container(
        target, {"metrics": 8080}, cpu=16 if small else 64, memory="32Gi" if small else "128Gi", tpu=kind.chips_per_host
    )
    # Select the machine type too, because a slice of 2x4 chips may also be two machines of four.
    selector = {**kind.gke_selector, "node.kubernetes.io/instance-type": pool.machine}
    tolerations = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    if target.capacity != "on-demand":
        key = f"cloud.google.com/gke-{target.capacity}"
        if target.capacity != QUEUED:  # GKE documents no label of its queued nodes, only their taint.
            selector[key] = "true"
        tolerations.append({"key": key, "operator": "Equal", "value": "true", "effect": "NoSchedule"})
    template = _template(
        target, container | _probes(_WORKER_HEALTH), {"nodeSelector": selector, "tolerations": tolerations}
    )
    if target.requests_slices:
        template["metadata"]["annotations"] |= consume_request(target, name)
    return {
        "groupName": name,
        "replicas": 0,
        "minReplicas": 0,
        "maxReplicas": most,
        "numOfHosts": kind.hosts,
        # These labels tell Ray's autoscaler on which group a slice's bundles fit.
        "labels": kind.host_selector,
        "rayStartParams": {"num-cpus": str(16 if small else 64)}
        # Ray counts device files, so the number of chips is given here if a chip has several.
        | ({"resources": f'"{{\\"TPU\\": {kind.chips_per_host}}}"'} if kind.chip.device_files > 1 else {}),
        "template": template,
    }


def _build_proxy(target: Target) -> Object:
    return {"initContainers": [run_proxy(target.cloud_sql)]} if target.cloud_sql else {}


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
        "securityContext": CONTAINER_SECURITY,
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
