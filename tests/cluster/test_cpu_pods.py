"""Pods without TPUs have room for all that Ray places on them, as Ray's own autoscaler and KubeRay count it."""

import contextlib
import dataclasses
import random

import pytest
import yaml
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.common_pb2 import LABEL_OPERATOR_NOT_IN

from actors.api.limits import ServiceLimits
from actors.api.processes import make_ingress, make_worker
from actors.api.settings import ServiceSettings
from actors.cli import main
from actors.pipeline.pools import build_application
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from cluster.chips import GIB
from cluster.errors import LayoutError
from cluster.footprints import LEADER, WORKER, Footprint, count_machines
from cluster.layout import Layout
from cluster.provision import kubernetes
from cluster.provision.pods import CPU_GROUP
from tests.cluster.test_kubernetes import REAL, TARGET, choose_launches
from wan_tpu.families import published_spec

STORED = ServiceSettings(database="postgresql://db/jobs", storage="gs://b/results", model="m")
MANIFESTS = ["manifests", "--image", "registry/wan-tpu:1", "--layout", "four-pools"]
HUB = ["--model_id", "Wan-AI/Wan2.2-I2V-A14B-Diffusers"]
SERVICE = ["--service", *HUB, "--snapshots", "gs://b/s", "--results", "gs://b/r", "--database", "postgresql:///jobs"]


def make_target(ingresses, limits=STORED.limits):
    return dataclasses.replace(TARGET, processes=(*[limits.ingress] * ingresses, WORKER))


def find_model(layout):
    """Return a model whose stages the layout hosts."""
    for name in ("wan2.2-i2v-a14b", "wan2.1-t2v-1.3b", "ltx-2.3-distilled", "minimax-h3"):
        model = published_spec(name)
        with contextlib.suppress(LayoutError):
            layout.check_stages(tuple(model.components), model.optional_stages)
            return model
    raise AssertionError(f"{layout.source} hosts no model")


def requests_of(layout, ingresses):
    """Return what Ray is asked for: all replicas of a service's deployments, at most."""
    settings = PipelineSettings("gs://b/model", "gs://b/snapshots")
    spec = PipelineSpec(layout, settings, find_model(layout), lasting=True)
    pools = [build_application(pool, settings)._bound_deployment.init_args[0] for pool in layout.pools]
    counted = [(leaders, pool.replicas.maximum) for leaders, pool in zip(pools, layout.pools, strict=True)]
    counted += [(make_worker(STORED, spec), 1), (make_ingress(STORED, spec, replicas=ingresses), ingresses)]
    for application, count in counted:
        options = application._bound_deployment.ray_actor_options
        [(label, operands)] = options["label_selector"].items()
        elsewhere = (label, LABEL_OPERATOR_NOT_IN, operands.removeprefix("!in(").removesuffix(")").split(","))
        resources = {"CPU": options["num_cpus"], "memory": options["memory"]}
        yield from [ResourceRequestUtil.make(resources, label_selectors=[[elsewhere]])] * count


@pytest.mark.parametrize("name", REAL)
def test_service_s_processes_fit_the_pods_that_may_be_launched(name, cluster):
    """Twice as many do, too, as while it is updated; and nothing of a TPU is launched for them."""
    layout = Layout.load(name)
    for ingresses in (1, 8):
        target = make_target(ingresses)
        [pods] = [
            group["maxReplicas"]
            for group in kubernetes.build_cluster_spec(layout, target)["workerGroupSpecs"]
            if group["groupName"] == CPU_GROUP
        ]
        once = list(requests_of(layout, ingresses))
        for requests in (once, 2 * once):
            by_count = ResourceRequestUtil.group_by_count(requests)
            counts, infeasible = choose_launches(layout, target, resource_requests=by_count)
            assert not infeasible and {*counts} == {CPU_GROUP} and counts[CPU_GROUP] <= pods


def test_processes_and_the_object_store_fit_the_container():
    spec = kubernetes.build_cluster_spec(Layout.load(REAL[0]), make_target(1))
    for group in (spec["headGroupSpec"], spec["workerGroupSpecs"][0]):
        [container] = group["template"]["spec"]["containers"]
        params, limit = group["rayStartParams"], int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
        # What KubeRay passes to `ray start` where these parameters don't say it: the whole limit.
        offered = int(params.get("memory", limit * GIB))
        assert offered + int(params["object-store-memory"]) <= (limit - 1) * GIB


def test_pods_are_enough_in_whatever_order_ray_places_processes():
    rng, pod = random.Random(0), Footprint(4, 11 * GIB)
    for _ in range(50):
        processes = [LEADER] * rng.randrange(60) + [WORKER] + [ServiceLimits().ingress] * rng.randrange(1, 9)
        rng.shuffle(processes)
        free = []
        for process in processes:
            having = [room for room in free if room[0] >= process.cpus and room[1] >= process.memory_bytes]
            if not having:
                free.append(having := [pod.cpus, pod.memory_bytes])
                having = [having]
            room = rng.choice(having)
            room[0], room[1] = room[0] - process.cpus, room[1] - process.memory_bytes
        assert len(free) <= count_machines(processes, pod)


def test_ingress_larger_than_a_pod_is_refused():
    with pytest.raises(LayoutError, match=r"17\.4 GiB.* 11 GiB.*--limit"):
        kubernetes.build_cluster_spec(Layout.load(REAL[0]), make_target(1, ServiceLimits(readers=9)))


def test_ingresses_are_counted_in_the_pods(capsys):
    def count(*argv):
        assert main([*MANIFESTS, *argv]) == 0
        specs = [item.get("spec", {}) for item in yaml.safe_load_all(capsys.readouterr().out)]
        [spec] = [spec[name] for spec in specs for name in ("rayClusterConfig", "rayClusterSpec") if name in spec]
        return spec["workerGroupSpecs"][0]["maxReplicas"]

    few, many = count(*SERVICE), count(*SERVICE, "--ingresses", "8")
    assert few < many and count("--job", "gs://b/in.jsonl", "--output", "gs://b/o", *HUB) <= few
