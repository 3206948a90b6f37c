"""What KubeRay makes of our objects: every selector, port and probe reaches the pods that it is meant for."""

import dataclasses
import re

import pytest

from cluster.layout import Layout
from cluster.provision import kubernetes
from cluster.provision.exposure import Exposure, build_exposing_objects
from cluster.provision.pods import CPU_GROUP, LOAD_BALANCERS, SERVE_PORT
from cluster.provision.target import Target
from tests.cluster.kuberay_rules import PROBES, WAITS, pods_of, selects, services_of
from tests.cluster.test_kubernetes import KINDS
from tests.conftest import ROOT

TARGET = Target("wan", "videos", "registry/wan-tpu:1", "2.60.0", public=True)
VERSIONS = [(1, 5), (1, 7)]
DOCKERFILE = ROOT / "cluster" / "Dockerfile"


@pytest.fixture(params=["service", "cluster", "job"])
def rendered_cluster(request):
    """Return a cluster's spec, the name that KubeRay gives it, and the RayService that it belongs to."""
    layout = Layout.parse(KINDS, "kinds")
    if request.param == "service":
        service = kubernetes.build_service(layout, TARGET, "applications: []\n")
        return service["spec"]["rayClusterConfig"], "wan-x7k2p", "wan"
    if request.param == "job":
        return kubernetes.build_job(layout, TARGET, "drive")["spec"]["rayClusterSpec"], "wan-x7k2p", None
    return kubernetes.build_cluster(layout, TARGET)["spec"], "wan", None


def rendered_pods(rendered, version=(1, 7)):
    spec, cluster, service = rendered
    return pods_of(spec, cluster, in_service=service is not None, version=version)


def test_head_service_selects_the_head_alone(rendered_cluster):
    spec, cluster, service = rendered_cluster
    [head, *others] = services_of(spec, cluster, service)
    pods = rendered_pods(rendered_cluster)
    assert [name for name, pod in pods.items() if head.selects(pod)] == ["headgroup"]
    assert head.ports["serve"] == SERVE_PORT and head.ports["dashboard"] == 8265
    for other in others:
        assert any(other.selects(pod) for pod in pods.values()), other
        assert not other.selects(pods["headgroup"]) or service is not None
    assert head.name == "wan-head-svc" or service is None


@pytest.mark.parametrize("version", VERSIONS)
def test_every_probe_is_one_that_the_image_can_answer(rendered_cluster, version):
    """Neither wget nor curl is in the image, and no path asks for the cluster's token."""
    for name, pod in rendered_pods(rendered_cluster, version).items():
        for probe in PROBES:
            assert "exec" not in pod.probes[probe], (name, probe)
            path = pod.probes[probe]["httpGet"]["path"]
            assert pod.probes[probe]["httpGet"]["port"] == 52365
            assert path == ("/api/healthz" if name == "headgroup" else "/api/local_raylet_healthz")


def test_worker_waits_for_the_head_by_a_service_that_selects_it(rendered_cluster):
    """Its command is `ray` in a login shell, whose PATH has none of the image's."""
    spec, cluster, service = rendered_cluster
    services, pods = {item.name: item for item in services_of(spec, cluster, service)}, rendered_pods(rendered_cluster)
    for name, pod in pods.items():
        waiting = [container for container in pod.init_containers if container["name"] == WAITS]
        assert len(waiting) == (name != "headgroup")
        for container in waiting:
            address, port = re.search(r"ray health-check --address (\S+):(\d+)", container["args"][0]).groups()
            assert services[address].selects(pods["headgroup"]) and services[address].ports["gcs-server"] == int(port)
            assert container["image"] == TARGET.image
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
    [linked] = re.findall(
        r'for name in (.*); do ln .*"/opt/wan-tpu/bin/\$name" /usr/local/bin/', DOCKERFILE.read_text()
    )
    assert {"ray", "python"} <= set(linked.split())


def test_what_stands_beside_selects_the_pods_that_it_is_for(rendered_cluster):
    pods = rendered_pods(rendered_cluster)
    objects = {
        (item["kind"], item["metadata"]["name"]): item
        for item in kubernetes.build_supporting_objects(TARGET, http=True).values()
    }
    assert len(objects) == 5
    everyone = [
        objects["NetworkPolicy", "wan"]["spec"]["podSelector"],
        objects["PodMonitoring", "wan"]["spec"]["selector"],
    ]
    for selector in everyone:
        assert all(selects(selector["matchLabels"], pod) for pod in pods.values())
    for name, group in (("wan-head", "headgroup"), ("wan-cpu", CPU_GROUP)):
        budget = objects["PodDisruptionBudget", name]["spec"]
        assert [item for item, pod in pods.items() if selects(budget["selector"]["matchLabels"], pod)] == [group]
        assert budget["minAvailable"] == 1 and "maxUnavailable" not in budget


def test_ports_of_the_policy_and_of_the_monitor_are_those_of_containers(rendered_cluster):
    pods = rendered_pods(rendered_cluster)
    objects = {item["kind"]: item for item in kubernetes.build_supporting_objects(TARGET, http=True).values()}
    assert all(pod.ports["metrics"] == 8080 for pod in pods.values())
    assert objects["PodMonitoring"]["spec"]["endpoints"][0]["port"] == "metrics"
    opened = {port["port"] for rule in objects["NetworkPolicy"]["spec"]["ingress"] for port in rule.get("ports", ())}
    assert opened == {8080, 8265, SERVE_PORT} <= {*pods["headgroup"].ports.values()}


def test_load_balancer_is_let_in_only_where_there_is_one():
    def blocks(target):
        policy = next(
            item
            for item in kubernetes.build_supporting_objects(target, http=True).values()
            if item["kind"] == "NetworkPolicy"
        )
        sources = [source for rule in policy["spec"]["ingress"] for source in rule.get("from", ())]
        return [source["ipBlock"]["cidr"] for source in sources if "ipBlock" in source]

    assert blocks(TARGET) == [*LOAD_BALANCERS]
    assert blocks(dataclasses.replace(TARGET, public=False)) == []


def test_load_balancer_reaches_the_head_that_serves():
    layout, exposure = Layout.parse(KINDS, "kinds"), Exposure("videos.example.com", "certificates", "front", "armor")
    spec = kubernetes.build_service(layout, TARGET, "applications: []\n")["spec"]["rayClusterConfig"]
    pods = pods_of(spec, "wan-x7k2p", in_service=True, version=(1, 7))
    objects = {
        (item["kind"], item["metadata"]["name"]): item for item in build_exposing_objects(TARGET, exposure).values()
    }
    service = objects["Service", "wan-public"]["spec"]
    assert [name for name, pod in pods.items() if selects(service["selector"], pod)] == ["headgroup"]
    assert service["type"] == "ClusterIP" and service["ports"][0]["targetPort"] == pods["headgroup"].ports["serve"]
    gateway = objects["Gateway", "wan"]
    listeners = {item["name"]: item for item in gateway["spec"]["listeners"]}
    for name, (protocol, port) in {"https": ("HTTPS", 443), "http": ("HTTP", 80)}.items():
        assert (listeners[name]["protocol"], listeners[name]["port"]) == (protocol, port)
        route = objects["HTTPRoute", f"wan-{name}"]["spec"]
        assert route["parentRefs"] == [{"name": "wan", "sectionName": name}]
        assert route["hostnames"] == [listeners[name]["hostname"]] == ["videos.example.com"]
    [backend] = objects["HTTPRoute", "wan-https"]["spec"]["rules"][0]["backendRefs"]
    assert backend == {"name": "wan-public", "port": service["ports"][0]["port"]}
    for kind in ("HealthCheckPolicy", "GCPBackendPolicy"):
        assert objects[kind, "wan"]["spec"]["targetRef"] == {"group": "", "kind": "Service", "name": "wan-public"}
    assert objects["GCPBackendPolicy", "wan"]["spec"]["default"]["securityPolicy"] == "armor"
    assert gateway["metadata"]["annotations"] == {"networking.gke.io/certmap": "certificates"}


def test_pods_are_nobody_privileged_and_stay_where_they_are(rendered_cluster):
    spec, _, _ = rendered_cluster
    for pod in rendered_pods(rendered_cluster).values():
        assert pod.spec["securityContext"]["runAsNonRoot"] and pod.spec["securityContext"]["runAsUser"] == 1000
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"]["ephemeral-storage"] == "20Gi"
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    key = "cluster-autoscaler.kubernetes.io/safe-to-evict"
    assert all(group["template"]["metadata"]["annotations"][key] == "false" for group in groups)
    assert spec["autoscalerOptions"]["securityContext"]["allowPrivilegeEscalation"] is False


def test_weights_of_the_hub_have_room_on_the_hosts_disks():
    spec = kubernetes.build_cluster(Layout.parse(KINDS, "kinds"), dataclasses.replace(TARGET, from_hub=True))["spec"]
    sizes = {
        group["groupName"]: group["template"]["spec"]["containers"][0]["resources"]["requests"]["ephemeral-storage"]
        for group in spec["workerGroupSpecs"]
    }
    assert sizes.pop(CPU_GROUP) == "20Gi" and set(sizes.values()) == {"180Gi"}
