"""Build the Kubernetes objects that run a layout on GKE: Ray clusters, services and jobs for KubeRay 1.5 and later.

Each kind of slice is a worker group. KubeRay creates the pods of whole slices, GKE's TPU webhook tells each pod its
place in its slice, and Ray's autoscaler launches slices for the bundles that leaders request. Leaders and HTTP
ingresses run in a group without TPUs. The pods themselves are those of `cluster.provision.pods`.

Sources: KubeRay's schemas of ray.io/v1; docs.ray.io, "Ray on Kubernetes", for token authentication.
"""

from collections.abc import Mapping

from cluster.layout import Layout
from cluster.provision.node_pools import list_node_pools
from cluster.provision.pods import (
    CPU_GROUP,
    HEAD,
    LOAD_BALANCERS,
    SERVE_PORT,
    build_cpu_group,
    build_head_group,
    build_slice_groups,
)
from cluster.provision.target import CONTAINER_SECURITY, Object, Target
from cluster.readable_yaml import dump_yaml

API = "ray.io/v1"
LAYOUT_FILE = "/etc/wan-tpu/layout.yaml"  # Where pods mount the layout of their job or service.
# The kinds of objects that have a pod's metrics collected, by GKE's managed Prometheus and by the Prometheus operator.
MONITORS = {"PodMonitoring": "monitoring.googleapis.com/v1", "PodMonitor": "monitoring.coreos.com/v1"}


def build_cluster_spec(layout: Layout, target: Target) -> Object:
    """Return the spec of a Ray cluster.

    Raises:
        LayoutError: GKE has no machines for a kind of slice, the layout is for emulated slices, or a process of the
            service needs more memory than a pod without TPUs has.
    """
    groups = [
        build_cpu_group(layout, target),
        *(group for pool in list_node_pools(layout) for group in build_slice_groups(pool, target)),
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
        "headGroupSpec": build_head_group(target),
        "workerGroupSpecs": groups,
    }


def build_supporting_objects(target: Target, *, http: bool) -> dict[str, Object]:
    """Return the objects that accompany a cluster: service account, network policy, disruption budgets, monitoring.

    Args:
        http: Whether the cluster answers HTTP on port 8000.

    Returns:
        The objects, by the comment for each.
    """
    annotations = {"iam.gke.io/gcp-service-account": target.account} if target.account else {}
    account = target.build_object("v1", "ServiceAccount")
    account["metadata"] |= {"annotations": annotations} if annotations else {}
    objects = {"the pods' identity at Google Cloud": account, **_build_network_policy(target, http=http)}
    for name, pods in (("head", HEAD), (CPU_GROUP, {"ray.io/group": CPU_GROUP})):
        # Percentages and maxUnavailable need the scale subresource of the pods' owner; a RayCluster has none.
        spec = {"minAvailable": 1, "selector": {"matchLabels": target.labels | pods}}
        budget = target.build_object("policy/v1", "PodDisruptionBudget", suffix=name, spec=spec)
        objects[f"keeps a node from being drained until another pod has replaced its {name} pod"] = budget
    if target.monitor is not None:
        endpoints = "endpoints" if target.monitor == "PodMonitoring" else "podMetricsEndpoints"
        spec = {"selector": {"matchLabels": target.labels}, endpoints: [{"port": "metrics", "interval": "30s"}]}
        objects["has Prometheus collect Ray's metrics from each pod"] = target.build_object(
            MONITORS[target.monitor], target.monitor, spec=spec
        )
    return objects


def _build_network_policy(target: Target, *, http: bool) -> dict[str, Object]:
    pods = {"matchLabels": target.labels}
    # KubeRay's operator may run in any namespace. It needs the dashboard's port, which requires the cluster's token.
    ports: list[int] = [8265, *([SERVE_PORT] if http else [])]
    ingress: list[Object] = [
        {"from": [{"podSelector": pods}]},
        {"from": [{"namespaceSelector": {}}], "ports": [{"port": port, "protocol": "TCP"} for port in ports]},
        {"ports": [{"port": 8080, "protocol": "TCP"}]},
    ]
    comment = (
        "lets only these connect to the pods: the pods, KubeRay's operator, the service's clients, collectors "
        "of metrics"
    )
    if target.public:
        blocks = [{"ipBlock": {"cidr": cidr}} for cidr in LOAD_BALANCERS]
        ingress.append({"from": blocks, "ports": [{"port": SERVE_PORT, "protocol": "TCP"}]})
        comment += ",\nand Google's front ends, which also check the service's health"
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress}
    return {comment: target.build_object("networking.k8s.io/v1", "NetworkPolicy", spec=spec)}


def build_service(layout: Layout, target: Target, config: str) -> Object:
    """Return a RayService. Its pods mount the layout from the ConfigMap of `build_layout_map`, at `LAYOUT_FILE`."""
    spec = {"serveConfigV2": config, "rayClusterConfig": _mount_layout(build_cluster_spec(layout, target), target)}
    return target.build_object(API, "RayService", spec=spec)


def build_job(layout: Layout, target: Target, entrypoint: str) -> Object:
    """Return a RayJob, whose cluster is deleted when the job has ended.

    Its pods mount the layout from the ConfigMap of `build_layout_map`, at `LAYOUT_FILE`.
    """
    spec = {
        "entrypoint": entrypoint,
        "submissionMode": "HTTPMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 300,
        "rayClusterSpec": _mount_layout(build_cluster_spec(layout, target), target),
    }
    return target.build_object(API, "RayJob", spec=spec)


def build_layout_map(target: Target, text: str) -> Object:
    """Return the ConfigMap with the layout of a job or a service; `text` is the content of the layout file."""
    return target.build_object("v1", "ConfigMap", suffix="layout", data={LAYOUT_FILE.rpartition("/")[2]: text})


def _mount_layout(cluster: Object, target: Target) -> Object:
    """Mount the layout file in all pods of a cluster, because Serve may build an application on any of them."""
    folder, _, _ = LAYOUT_FILE.rpartition("/")
    name = build_layout_map(target, "")["metadata"]["name"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        pod["volumes"] = [{"name": "layout", "configMap": {"name": name}}]
        # Mount a folder, because Kubernetes never updates a file that is mounted with subPath.
        pod["containers"][0]["volumeMounts"] = [{"name": "layout", "mountPath": folder, "readOnly": True}]
    return cluster


def build_cluster(layout: Layout, target: Target) -> Object:
    """Return a RayCluster, on which `wan-tpu submit`, `pipeline` and `serve` can run."""
    return target.build_object(API, "RayCluster", spec=build_cluster_spec(layout, target))


def format_yaml(objects: Mapping[str, Object]) -> str:
    """Return objects as the documents of a YAML text, each below its comment, which is its key."""
    documents = []
    for comment, content in objects.items():
        lines = "".join(f"# {line}\n" for line in comment.splitlines())
        documents.append(lines + dump_yaml(content))
    return "---\n".join(documents)
