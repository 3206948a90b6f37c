"""What KubeRay 1.5 and 1.7 make of a RayCluster: selectors, ports, probes and init containers.

Facts of ray-operator/controllers/ray/common/{service,pod}.go and utils/constant.go at v1.5.1 and at 1.7 (feeaf72),
written anew: a change there has to be followed here.
"""

from dataclasses import dataclass, field
from typing import Any

FIXED_LABELS = ("ray.io/node-type", "ray.io/group", "ray.io/cluster")  # Which a pod template can't override.


@dataclass(frozen=True)
class Pod:
    """A pod as KubeRay creates it, with the ports and probes of its first container."""

    labels: dict[str, str]
    ports: dict[str, int]
    probes: dict[str, Any]
    containers: list[dict[str, Any]]
    init_containers: list[dict[str, Any]]
    spec: dict[str, Any]


@dataclass(frozen=True)
class Service:
    name: str
    selector: dict[str, str]
    ports: dict[str, int] = field(default_factory=dict)

    def selects(self, pod):
        return selects(self.selector, pod)


def selects(labels, pod):
    return labels.items() <= pod.labels.items()


def default_labels(cluster, kind, group):
    return {
        "ray.io/is-ray-node": "yes",
        "ray.io/cluster": cluster,
        "ray.io/node-type": kind,
        "ray.io/group": group,
        "ray.io/identifier": f"{cluster}-{kind}",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }


def pods_of(spec, cluster, *, in_service, version):
    """Return the head's pod and one pod of each worker group, by group."""
    groups = [("head", "headgroup", spec["headGroupSpec"])]
    groups += [("worker", group["groupName"], group) for group in spec["workerGroupSpecs"]]
    return {name: _pod(kind, name, group, cluster, in_service, version) for kind, name, group in groups}


def _pod(kind, name, group, cluster, in_service, version):
    labels = default_labels(cluster, kind, name)
    own = group["template"]["metadata"].get("labels", {}) | group.get("labels", {})
    labels |= {key: value for key, value in own.items() if key not in FIXED_LABELS}
    if in_service:  # The head's is set by the operator once its proxy answers.
        labels["ray.io/serve"] = "true"
    containers = group["template"]["spec"]["containers"]
    ray = containers[0]
    probes = {name: ray.get(name) or _inject_probe(kind, in_service, version) for name in PROBES}
    ports = {port["name"]: port["containerPort"] for port in ray.get("ports", ())}
    spec = group["template"]["spec"]
    waits = [_wait_for_head(ray, cluster)] if kind == "worker" else []
    return Pod(labels, {"metrics": 8080} | ports, probes, containers, [*spec.get("initContainers", ()), *waits], spec)


PROBES = ("livenessProbe", "readinessProbe")
WAITS = "wait-gcs-ready"  # The last init container of each worker: it runs Ray's own client until the head answers.


def _wait_for_head(ray, cluster):
    """Return that container: the image, rights and environment are Ray's, the shell is a login shell."""
    same = {key: ray[key] for key in ("image", "securityContext", "env", "envFrom", "volumeMounts") if key in ray}
    few = {"cpu": "200m", "memory": "256Mi"}
    return same | {
        "name": WAITS,
        "command": ["/bin/bash", "-lc", "--"],
        "args": [f"until ray health-check --address {cluster}-head-svc:6379; do sleep 5; done"],
        "resources": {"requests": few, "limits": few},
    }


def _inject_probe(kind, in_service, version):
    """Return the probe that the operator adds if a container has none; version 1.5 knows only commands."""
    if version >= (1, 6) and not (in_service and kind == "worker"):
        return {"httpGet": {"path": "/api/healthz", "port": 52365}}
    return {"exec": {"command": ["bash", "-c", "wget --tries 1 -T 2 -q -O- http://localhost:52365/... | grep success"]}}


def services_of(spec, cluster, service=None):
    """Return the services of a cluster, which may belong to the RayService named `service`."""
    head = spec["headGroupSpec"]["template"]["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    # The selector has the values of KubeRay's own labels, whatever labels the pods were given.
    labels = default_labels(cluster, "head", "headgroup")
    selector = {key: labels[key] for key in labels if key not in ("ray.io/is-ray-node", "ray.io/group")}
    services = [Service(f"{service or cluster}-head-svc", selector, ports)]
    if service is not None:
        serving = {name: port for name, port in ports.items() if name == "serve" or name.startswith("serve-")}
        services.append(Service(f"{cluster}-head-svc", selector, ports))  # The cluster's own, by which workers find it.
        services.append(Service(f"{service}-serve-svc", {"ray.io/cluster": cluster, "ray.io/serve": "true"}, serving))
    if any(group.get("numOfHosts", 1) > 1 for group in spec["workerGroupSpecs"]):
        services.append(Service(f"{cluster}-headless", {"ray.io/cluster": cluster, "ray.io/node-type": "worker"}))
    return services
