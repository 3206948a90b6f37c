"""What Kubernetes is given to run a layout: Ray clusters, services and jobs as KubeRay 1.5 and later take them, on GKE.

A kind of slice is a worker group: KubeRay makes whole slices of its pods, GKE's TPU webhook tells each its place there,
and Ray's autoscaler launches them for the bundles that a slice asks for. Leaders and HTTP run in a group without TPUs.

Sources: KubeRay's schemas of ray.io/v1; docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus for node
selectors; docs.ray.io, "Ray on Kubernetes", for TPUs, probes and token authentication.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from cluster.errors import LayoutError
from cluster.layout import Layout
from cluster.slice_spec import SliceSpec

Object = dict[str, Any]

API = "ray.io/v1"
CPU_GROUP = "cpu"
# Of every container.
ENVIRONMENT = {
    # GKE takes a spot node away 15 s after it has said so; what drains then must have ended before.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "13",
    "RAY_JOB_STOP_WAIT_TIME_S": "60",  # a job that is stopped takes its pipeline down
    # docs/serving.md
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
}
# Where Ray's dashboard may trace a host: JAX's profiler listens there, and asks for no token.
_TRACES = {"RAY_DASHBOARD_ENABLE_PROFILING": "1", "JAX_PROFILER_PORT": "9999"}
_HEALTHY: Object = {"path": "/api/local_raylet_healthz", "port": 52365}  # of Ray's agent on each node
# What collects a pod's figures, by kind: GKE's own managed Prometheus, or the Prometheus operator.
MONITORS = {"PodMonitoring": "monitoring.googleapis.com/v1", "PodMonitor": "monitoring.coreos.com/v1"}
_LEADERS_A_CPU = 10  # and other actors of 0.1 CPU
_CPUS = 4  # of a pod without TPUs


@dataclass(frozen=True)
class Target:
    """Where and how it runs.

    account   Google's service account that the pods act as, to reach buckets
    secret    name of a Secret whose keys are environment variables of all pods (PGPASSWORD)
    capacity  of TPU machines: "on-demand", "spot", "flex-start"
    queue     Kueue's local queue that it waits in; a cluster that waits so has all its slices from the start, since
              Kueue admits none that scales
    monitor   which of `MONITORS` collects its figures, None: nothing does
    traces    whether Ray's dashboard may trace a host, whose image then has TensorFlow
    idle_s    until a slice that nobody holds is given back
    """

    name: str
    namespace: str
    image: str
    ray_version: str
    account: str | None = None
    secret: str | None = None
    capacity: str = "on-demand"
    queue: str | None = None
    monitor: str | None = "PodMonitoring"
    traces: bool = False
    idle_s: int = 600

    @property
    def labels(self) -> dict[str, str]:
        """Of all objects and pods."""
        return {"app.kubernetes.io/name": "wan-tpu", "app.kubernetes.io/instance": self.name}

    def object(self, api: str, kind: str, **content: Any) -> Object:
        """Return an object of that name."""
        return {"apiVersion": api, "kind": kind, "metadata": self._metadata(kind), **content}

    def _metadata(self, kind: str) -> Object:
        queued = {"kueue.x-k8s.io/queue-name": self.queue} if self.queue and kind.startswith("Ray") else {}
        return {"name": self.name, "namespace": self.namespace, "labels": self.labels | queued}


def ray_cluster(layout: Layout, target: Target) -> Object:
    """Return the spec of a Ray cluster; raises `LayoutError` for kinds of slices that GKE has no machine for."""
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
        "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": target.idle_s},
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


def supporting(target: Target, *, http: bool) -> list[Object]:
    """Return what stands beside a cluster: its account, who may reach it, and where its figures are.

    http  whether it answers on port 8000
    """
    annotations = {"iam.gke.io/gcp-service-account": target.account} if target.account else {}
    account = target.object("v1", "ServiceAccount")
    account["metadata"] |= {"annotations": annotations} if annotations else {}
    pods = {"matchLabels": target.labels}
    # KubeRay's operator, wherever it runs, needs the dashboard's port, which asks for the cluster's token.
    doors: list[int] = [8265, *([8000] if http else [])]
    policy = target.object(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        spec={
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": pods}]},
                {"from": [{"namespaceSelector": {}}], "ports": [{"port": port, "protocol": "TCP"} for port in doors]},
                {"ports": [{"port": 8080, "protocol": "TCP"}]},
            ],
        },
    )
    if target.monitor is None:
        return [account, policy]
    endpoints = "endpoints" if target.monitor == "PodMonitoring" else "podMetricsEndpoints"
    spec = {"selector": pods, endpoints: [{"port": "metrics", "interval": "30s"}]}
    return [account, policy, target.object(MONITORS[target.monitor], target.monitor, spec=spec)]


def service(layout: Layout, target: Target, config: str) -> Object:
    """Return a RayService; config: Serve's, as YAML."""
    spec = {"serveConfigV2": config, "rayClusterConfig": ray_cluster(layout, target)}
    return target.object(API, "RayService", spec=spec)


def job(layout: Layout, target: Target, entrypoint: str) -> Object:
    """Return a RayJob, whose cluster goes when it has ended."""
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
    """Return objects as documents of one YAML text, each below a comment, its key."""
    documents = []
    for comment, content in objects.items():
        lines = "".join(f"# {line}\n" for line in comment.splitlines())
        documents.append(lines + yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=120))
    return "---\n".join(documents)


# ---- pods


def _head(target: Target) -> Object:
    ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "serve": 8000, "metrics": 8080}
    container = _container(target, ports, cpu=4, memory="16Gi")
    # Nothing is placed on the head: it dies with what overloads it, and all others with it.
    return {
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
        "template": _template(target, container, {}),
    }


def _cpu_group(layout: Layout, target: Target) -> Object:
    """Return the group of leaders, drivers, workers and ingresses: on a TPU host they would be lost with its slice."""
    container = _container(target, {"metrics": 8080}, cpu=_CPUS, memory="16Gi") | _probes()
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
    """Return the group of a kind of slice: none at first, what is asked for later, `most` in all."""
    machine = kind.chip.gke_machines.get(kind.chips_per_host)
    if machine is None:
        known = ", ".join(kind.chip.gke_machines.values()) or "none"
        raise LayoutError(f"{source}: GKE has no machine for a {kind}; for {kind.chip.name} it has {known}")
    small = kind.chips_per_host == 1
    container = _container(
        target, {"metrics": 8080}, cpu=16 if small else 64, memory="32Gi" if small else "128Gi", tpu=kind.chips_per_host
    )
    # The machine, too: a slice of 2x4 chips may also be two machines of four.
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
        # By these Ray's autoscaler knows which group a slice's bundles fit on.
        "labels": kind.host_selector,
        "rayStartParams": {"num-cpus": str(16 if small else 64)}
        # Ray counts device files, so it is told the number where a chip has several.
        | ({"resources": f'"{{\\"TPU\\": {kind.chips_per_host}}}"'} if kind.chip.device_files > 1 else {}),
        "template": _template(target, container | _probes(), {"nodeSelector": selector, "tolerations": tolerations}),
    }


def _template(target: Target, container: Object, more: Object) -> Object:
    spec: Object = {"serviceAccountName": target.name, "terminationGracePeriodSeconds": 30, **more}
    return {"metadata": {"labels": target.labels}, "spec": spec | {"containers": [container]}}


def _container(target: Target, ports: Mapping[str, int], *, cpu: int, memory: str, tpu: int = 0) -> Object:
    requests: Object = {"cpu": str(cpu), "memory": memory}
    limits: Object = {}
    if tpu:  # alone on its machine: no limit of CPU and memory
        requests["google.com/tpu"] = limits["google.com/tpu"] = str(tpu)
    else:
        limits = dict(requests)
    environment = {"ENABLE_PJRT_COMPATIBILITY": "true"} | ENVIRONMENT | (_TRACES if target.traces else {})
    found: Object = {
        "name": "ray",
        "image": target.image,
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": {"requests": requests, "limits": limits},
    }
    if target.secret is not None:
        found["envFrom"] = [{"secretRef": {"name": target.secret}}]
    return found


def _probes() -> Object:
    """Ready is a pod whose raylet is healthy: KubeRay's own probe would wait for an ingress, which few of them have."""
    probe = {"httpGet": _HEALTHY, "periodSeconds": 5, "timeoutSeconds": 5}
    return {
        "readinessProbe": probe | {"failureThreshold": 3},
        "livenessProbe": probe | {"initialDelaySeconds": 30, "failureThreshold": 24},
    }


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal parts out."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
