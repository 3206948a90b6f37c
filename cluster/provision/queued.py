"""Slices from the queue of Google's Dynamic Workload Scheduler, which needs a ProvisioningRequest for each.

Each slice has a request of its own, for as many pods as it has hosts, and a worker group whose pods use it. So slices
start as their machines come, and never in part. A request is used once: machines that are taken away aren't replaced.

Sources: docs.cloud.google.com/kubernetes-engine/docs/how-to/provisioningrequest; the Kubernetes autoscaler's
cluster-autoscaler/apis/provisioningrequest at 55c37cd.
"""

from collections.abc import Iterable

from cluster.provision.target import Object, Target

API = "autoscaling.x-k8s.io/v1"  # GKE 1.32.2-gke.1652000 and later.
CLASS = "queued-provisioning.gke.io"
_CONSUMES = "autoscaling.x-k8s.io/consume-provisioning-request"


def consume_request(target: Target, group: str) -> dict[str, str]:
    """Return the annotations of pods that run on what was requested for a worker group."""
    return {_CONSUMES: f"{target.name}-{group}", "autoscaling.x-k8s.io/provisioning-class-name": CLASS}


def request_slices(groups: Iterable[Object], target: Target) -> dict[str, Object]:
    """Return the requests of a cluster's worker groups, each with a comment, and the templates that they refer to."""
    objects: dict[str, Object] = {}
    for group in groups:
        template = group["template"]
        name = template["metadata"]["annotations"].get(_CONSUMES)
        if name is None:
            continue
        suffix = group["groupName"].rpartition("-")[0]
        pods = target.object("v1", "PodTemplate", suffix=suffix, template={"spec": _outline(template["spec"])})
        # GKE then adds to them what it adds to pods.
        pods["metadata"]["labels"] |= {"cloud.google.com/apply-warden-policies": "true"}
        objects[f"what a host of a {suffix} asks for"] = pods
        pod_set = {"count": group["numOfHosts"], "podTemplateRef": {"name": pods["metadata"]["name"]}}
        request = target.object(
            API,
            "ProvisioningRequest",
            suffix=group["groupName"],
            spec={"provisioningClassName": CLASS, "podSets": [pod_set]},
        )
        objects[f"the machines of slice {group['groupName']}: all of them, once Google has them, for seven days"] = (
            request
        )
    return objects


def _outline(spec: Object) -> Object:
    """Return what decides on which machines a pod fits."""
    containers = [{key: container[key] for key in ("name", "image", "resources")} for container in spec["containers"]]
    return {key: spec[key] for key in ("nodeSelector", "tolerations")} | {
        "containers": containers,
        "restartPolicy": "Never",
    }
