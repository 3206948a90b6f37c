"""Every object beside KubeRay's is one that Kubernetes, GKE and Prometheus's operators would take."""

import dataclasses

import pytest

from cluster.layout import Layout
from cluster.provision import kubernetes
from cluster.provision.exposure import Exposure, build_exposing_objects
from cluster.provision.queued import request_slices
from cluster.provision.target import Target
from tests.cluster.schemas import check
from tests.cluster.test_kubernetes import KINDS

TARGET = Target("wan", "videos", "registry/wan-tpu:1", "2.60.0", account="wan@p.iam.gserviceaccount.com", public=True)
EXPOSURE = Exposure("videos.example.com", "certificates", "front", "armor", "modern")


def build_objects():
    """Return every kind of object that stands beside a cluster."""
    queued = dataclasses.replace(TARGET, capacity="queued")
    groups = kubernetes.build_cluster_spec(Layout.parse(KINDS, "kinds"), queued)["workerGroupSpecs"]
    objects = [
        *kubernetes.build_supporting_objects(TARGET, http=True).values(),
        *kubernetes.build_supporting_objects(dataclasses.replace(TARGET, monitor="PodMonitor"), http=False).values(),
        *build_exposing_objects(TARGET, EXPOSURE).values(),
        *request_slices(groups, queued).values(),
        kubernetes.build_layout_map(TARGET, KINDS),
    ]
    return {(item["kind"], item["metadata"]["name"]): item for item in objects}


OBJECTS = build_objects()


@pytest.mark.parametrize("key", OBJECTS, ids="-".join)
def test_object_is_of_its_kind(key):
    check(OBJECTS[key])


def test_each_queued_slice_is_requested_whole_and_used_by_its_own_pods():
    queued = dataclasses.replace(TARGET, capacity="queued")
    spec = kubernetes.build_cluster_spec(Layout.parse(KINDS, "kinds"), queued)
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"] if group["groupName"] != "cpu"}
    objects = request_slices(spec["workerGroupSpecs"], queued).values()
    requests = {item["metadata"]["name"]: item["spec"] for item in objects if item["kind"] == "ProvisioningRequest"}
    templates = {item["metadata"]["name"]: item["template"] for item in objects if item["kind"] == "PodTemplate"}
    assert {name.removeprefix("wan-") for name in requests} == {*groups}
    assert len(groups) == 1 + 5 + 2 + 1 + 1 + 1  # Slices of v6e-1, v6e-8 in two pools, v6e-16, v5p-32, v5e-4, v7x-8.
    for name, group in groups.items():
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 1
        annotations = group["template"]["metadata"]["annotations"]
        assert annotations["autoscaling.x-k8s.io/consume-provisioning-request"] == f"wan-{name}"
        request = requests[f"wan-{name}"]
        assert annotations["autoscaling.x-k8s.io/provisioning-class-name"] == request["provisioningClassName"]
        [pods] = request["podSets"]
        assert pods["count"] == group["numOfHosts"]
        outline, real = templates[pods["podTemplateRef"]["name"]]["spec"], group["template"]["spec"]
        assert outline["nodeSelector"] == real["nodeSelector"] and outline["tolerations"] == real["tolerations"]
        assert outline["containers"][0]["resources"] == real["containers"][0]["resources"]
        assert {"key": "cloud.google.com/gke-queued", "operator": "Equal", "value": "true", "effect": "NoSchedule"} in (
            real["tolerations"]
        )
    assert "enableInTreeAutoscaling" not in spec


def test_kueue_requests_queued_slices_by_itself():
    """It annotates the pods that it admits, and would refuse a cluster with annotations of its own."""
    target = dataclasses.replace(TARGET, capacity="queued", queue="tpus")
    groups = kubernetes.build_cluster_spec(Layout.parse(KINDS, "kinds"), target)["workerGroupSpecs"]
    assert request_slices(groups, target) == {}
    assert [group["replicas"] for group in groups if group["groupName"] == "v6e-8"] == [5]


def test_database_s_proxy_is_beside_every_process_that_may_use_the_database():
    target = dataclasses.replace(TARGET, cloud_sql="p:us-east5:wan")
    service = kubernetes.build_service(Layout.parse(KINDS, "kinds"), target, "applications: []\n")
    check(service)
    spec = service["spec"]["rayClusterConfig"]
    pods = {group["groupName"]: group["template"]["spec"] for group in spec["workerGroupSpecs"]}
    pods["head"] = spec["headGroupSpec"]["template"]["spec"]
    proxied = {name: pod["initContainers"] for name, pod in pods.items() if "initContainers" in pod}
    assert {*proxied} == {"head", "cpu"}
    for [proxy] in proxied.values():
        assert proxy["restartPolicy"] == "Always"  # So it stays, and has started before the other containers.
        assert proxy["args"][-1] == "p:us-east5:wan" and "--auto-iam-authn" in proxy["args"]
        port = next(argument for argument in proxy["args"] if argument.startswith("--http-port="))
        assert port == f"--http-port={proxy['startupProbe']['httpGet']['port']}"
        assert proxy["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize(
    ("build", "cluster"), [(kubernetes.build_job, "rayClusterSpec"), (kubernetes.build_service, "rayClusterConfig")]
)
def test_all_pods_have_the_layout_as_a_file_that_follows_its_config_map(build, cluster):
    whole = build(Layout.parse(KINDS, "kinds"), TARGET, "drive")
    check(whole)
    layout = kubernetes.build_layout_map(TARGET, KINDS)
    spec = whole["spec"][cluster]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        [mount], [volume] = pod["containers"][0]["volumeMounts"], pod["volumes"]
        assert volume["configMap"]["name"] == layout["metadata"]["name"] and mount["name"] == volume["name"]
        assert [f"{mount['mountPath']}/{name}" for name in layout["data"]] == [kubernetes.LAYOUT_FILE]
        assert "subPath" not in mount  # Kubernetes never updates a file that is mounted by one.
    assert layout["data"]["layout.yaml"] == KINDS
