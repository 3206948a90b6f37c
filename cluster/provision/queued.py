"""Request slices from the queue of Google's Dynamic Workload Scheduler, with a ProvisioningRequest for each slice.

A slice's request is for as many pods as the slice has hosts, and the slice has a worker group of its own, whose pods
use the request. So each slice starts as soon as all of its machines are available, and never with a part of them. A
request is used only once: machines that Google takes away aren't replaced.

Sources: docs.cloud.google.com/kubernetes-engine/docs/how-to/provisioningrequest; the Kubernetes autoscaler's
cluster-autoscaler/apis/provisioningrequest at 55c37cd.
"""

from collections.abc import Iterable

from cluster.provision.target import Object, Target

API = "autoscaling.x-k8s.io/v1"  # GKE 1.32.2-gke.1652000 and later.
CLASS = "queued-provisioning.gke.io"
_CONSUMES = "autoscaling.x-k8s.io/consume-provisioning-request"


def consume_request(target: Target, group: str) -> dict[str, str]:
    """Return annotations by which the pods of a worker group run on the machines that were requested for it."""
    return {_CONSUMES: f"{target.name}-{group}", "autoscaling.x-k8s.io/provisioning-class-name": CLASS}


def request_slices(groups: Iterable[Object], target: Target) -> dict[str, Object]:
    """Return the provisioning requests of a cluster, and the pod templates that they refer to.

    Returns:
        The objects, by the comment for each.
    """
    objects: dict[str, Object] = {}
    for group in groups:
        template = group["template"]
        name = template["metadata"]["annotations"].get(_CONSUMES)
        if name is None:
            continue
        suffix = group["groupName"].rpartition("-")[0]
        pod_template = target.build_object(
            "v1", "PodTemplate", suffix=suffix, template={"spec": _select_requirements(template["spec"])}
        )
        # With this label, GKE changes the template in the same ways as it changes pods.
        pod_template["metadata"]["labels"] |= {"cloud.google.com/apply-warden-policies": "true"}
        objects[f"what a host of a {suffix} needs"] = pod_template
        pod_set = {"count": group["numOfHosts"], "podTemplateRef": {"name": pod_template["metadata"]["name"]}}
        request = target.build_object(
            API,
            "ProvisioningRequest",
            suffix=group["groupName"],
            spec={"provisioningClassName": CLASS, "podSets": [pod_set]},
        )
        comment = (
            f"all machines of slice {group['groupName']} at once, for seven days from the moment that Google "
            "has them available"
        )
        objects[comment] = request
    return objects


def _select_requirements(spec: Object) -> Object:
    """Return the parts of a pod's spec that decide which machines it fits on."""
    containers = [{key: container[key] for key in ("name", "image", "resources")} for container in spec["containers"]]
    return {key: spec[key] for key in ("nodeSelector", "tolerations")} | {
        "containers": containers,
        "restartPolicy": "Never",
    }
