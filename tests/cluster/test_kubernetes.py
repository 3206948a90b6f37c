"""What Kubernetes is given: against KubeRay's own schemas, and through Ray's own autoscaler, from no TPU to all."""

import dataclasses
import threading

import pytest
from ray._raylet import GcsClient
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.sdk import get_cluster_resource_state

from cluster.errors import LayoutError, SliceStartTimeout
from cluster.gang.placement import reserve
from cluster.layout import Layout, list_shipped
from cluster.provision import kubernetes
from cluster.provision.pods import CPU_GROUP
from cluster.provision.target import CAPACITIES, Target
from cluster.slice_spec import POD_TYPE
from tests.cluster.schemas import check
from tests.waiting import wait_for

TARGET = Target("wan", "videos", "registry/wan-tpu:1", "2.60.0", account="wan@p.iam.gserviceaccount.com", secret="db")
REAL = [name for name in list_shipped() if not name.startswith("emulated")]
KINDS = """
pools:
  one: {stages: [a], slice: v6e-1}
  flat: {stages: [b], slice: "v6e:2x4", replicas: {min: 1, max: 3}}
  same: {stages: [c], slice: v6e-8, replicas: 2}
  hosts: {stages: [d], slice: v6e-16, replicas: 2}
  cubes: {stages: [e], slice: v5p-32}
  litepod: {stages: [f], slice: v5e-4}
  new: {stages: [g], slice: v7x-8}
"""
MISSING = [pool.slice for pool in Layout.parse(KINDS, "kinds").pools if pool.name in ("flat", "hosts", "cubes", "new")]


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("name", REAL)
def test_kuberay_knows_every_field(name, capacity):
    layout, target = Layout.load(name), Target("w", "n", "image", "2.60.0", capacity=capacity, queue="tpus")
    for manifest in (
        kubernetes.build_cluster(layout, target),
        kubernetes.build_service(layout, target, "applications: []\n"),
        kubernetes.build_job(layout, target, "wan-tpu drive"),
    ):
        check(manifest)
        assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "tpus"


def test_what_waits_in_a_queue_has_a_size_that_kueue_can_admit():
    layout = Layout.parse(KINDS, "kinds")
    manifest = kubernetes.build_cluster(layout, dataclasses.replace(TARGET, queue="tpus"))
    check(manifest)
    assert "enableInTreeAutoscaling" not in manifest["spec"]
    for group in manifest["spec"]["workerGroupSpecs"]:
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] > 0


def node_types(layout, target):
    """Return a cluster's groups as Ray's autoscaler reads them, with its own code."""
    config = _derive_autoscaling_config_from_ray_cr(kubernetes.build_cluster(layout, target))
    return {
        name: NodeTypeConfig(
            name, kind["min_workers"], kind["max_workers"], resources=kind["resources"], labels=kind["labels"]
        )
        for name, kind in config["available_node_types"].items()
        if name != "headgroup"
    }


def choose_launches(layout, target=TARGET, **demands):
    """Return what the autoscaler launches, with the pod of leaders that always exists, and what it can't launch."""
    request = SchedulingRequest(
        disable_launch_config_check=True, node_type_configs=node_types(layout, target), max_num_nodes=100, **demands
    )
    reply = ResourceDemandScheduler().schedule(request)
    infeasible = [*reply.infeasible_gang_resource_requests, *reply.infeasible_resource_requests]
    return {launch.instance_type: launch.count for launch in reply.to_launch}, infeasible


@pytest.fixture(scope="module")
def waiting(cluster):
    """Yield what Ray's GCS tells the autoscaler while leaders wait for a slice of each missing kind, by pod type."""
    gangs = {}

    def pending():
        for gang in get_cluster_resource_state(GcsClient(cluster.address)).pending_gang_resource_requests:
            constraints = gang.bundle_selectors[0].resource_requests[0].label_selectors[0].label_constraints
            gangs[
                next(constraint.label_values[0] for constraint in constraints if constraint.label_key == POD_TYPE)
            ] = gang
        return len(gangs) == len(MISSING)

    def wait(kind):
        with pytest.raises(SliceStartTimeout):
            reserve(kind, "pool/0", 6)

    threads = [threading.Thread(target=wait, args=(kind,)) for kind in MISSING]
    for thread in threads:
        thread.start()
    wait_for(pending, "their requests")
    yield gangs
    for thread in threads:
        thread.join()


def test_slices_that_are_waited_for_at_once_are_all_launched(waiting):
    counts, infeasible = choose_launches(Layout.parse(KINDS, "kinds"), gang_resource_requests=list(waiting.values()))
    assert (counts, infeasible) == ({CPU_GROUP: 1} | {kind.pod_type: kind.hosts for kind in MISSING}, [])


def test_groups_have_what_their_pools_may_have():
    groups = {
        group["groupName"]: group
        for group in kubernetes.build_cluster(Layout.parse(KINDS, "kinds"), TARGET)["spec"]["workerGroupSpecs"]
    }
    flat = groups["v6e-8"]  # Two pools have it, under two names.
    assert (flat["minReplicas"], flat["maxReplicas"], flat["numOfHosts"]) == (0, 5, 1)
    selector = flat["template"]["spec"]["nodeSelector"]
    assert selector["cloud.google.com/gke-tpu-topology"] == "2x4"
    assert selector["node.kubernetes.io/instance-type"] == "ct6e-standard-8t"
    assert (groups["v6e-16"]["numOfHosts"], groups["v6e-16"]["maxReplicas"]) == (4, 2)
    container = groups["v6e-16"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"google.com/tpu": "4"}
    for name, kind in node_types(Layout.parse(KINDS, "kinds"), TARGET).items():
        assert name == CPU_GROUP or kind.resources["TPU"] in (1, 4, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{pools: {a: {stages: [x], slice: v7x-1}}}", "v7x-1.*v7x.*tpu7x-standard-4t"),
        ("{pools: {a: {stages: [x], slice: v6e-8}}, emulate: {devices_per_host: 1}}", "emulate"),
    ],
)
def test_a_layout_that_gke_can_not_have_is_refused(text, message):
    with pytest.raises(LayoutError, match=message):
        kubernetes.build_cluster(Layout.parse(text, "mine.yaml"), TARGET)
