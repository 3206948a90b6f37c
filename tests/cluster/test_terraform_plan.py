"""Terraform itself validates and plans the module with the Google provider's types, without a network."""

import json
import os
import shutil
import subprocess

import pytest

from cluster.layout import Layout
from cluster.provision import kubernetes
from cluster.provision.node_pools import format_variables
from cluster.provision.target import CAPACITIES, Target
from tests.cluster.terraform_provider import serve_provider
from tests.cluster.test_kubernetes import KINDS
from tests.cluster.test_terraform import FILES, KNOWN, PAGE


class Terraform:
    """Terraform in a copy of the module."""

    def __init__(self, folder, environment):
        self.folder, self._environment = folder, os.environ | environment

    def run(self, *arguments):
        command = ["terraform", *arguments]
        done = subprocess.run(command, cwd=self.folder, env=self._environment, capture_output=True, text=True)
        return done.stdout + done.stderr, done.returncode

    def plan(self, *arguments):
        """Return the values that resources will have, by their addresses."""
        project = ["-var=project=my-videos", "-var=region=us-east5", "-var=zone=us-east5-b"]
        text, code = self.run("plan", "-input=false", "-no-color", "-out=plan", *project, *arguments)
        assert code == 0, text
        text, code = self.run("show", "-json", "plan")
        plan = json.loads(text[text.index("{") : text.rindex("}") + 1])
        return {item["address"]: item["values"] for item in plan["planned_values"]["root_module"]["resources"]}


@pytest.fixture(scope="module")
def terraform(tmp_path_factory):
    if shutil.which("terraform") is None:
        pytest.skip("there is no terraform on this machine")
    folder = tmp_path_factory.mktemp("terraform")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with serve_provider(KNOWN, folder / "socket") as environment:
        terraform = Terraform(folder, environment)
        text, code = terraform.run("init", "-backend=false", "-no-color")
        assert code == 0, text
        yield terraform


def test_terraform_finds_it_valid_and_formatted(terraform):
    text, code = terraform.run("validate", "-no-color")
    assert code == 0 and "The configuration is valid" in text, text
    text, code = terraform.run("fmt", "-check", "-diff")
    assert code == 0, text


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('machine_type    = "e2-standard-8"', 'machine_type = ["e2-standard-8"]', "Incorrect attribute value type"),
        ("google_service_account.nodes.email", "google_service_account.nodes.mail", "Unsupported attribute"),
        ("gateway_api_config {", "gateway_config {", "Unsupported block type"),
    ],
)
def test_terraform_finds_mistakes_with_these_types(old, new, problem, terraform):
    file = terraform.folder / "cluster.tf"
    assert old in FILES[file.name]
    file.write_text(FILES[file.name].replace(old, new))
    text, code = terraform.run("validate", "-no-color")
    file.write_text(FILES[file.name])
    assert code != 0 and problem in text


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_planned_node_pools_have_the_machines_that_pods_select(capacity, terraform):
    layout = Layout.parse(f"{KINDS}  cube: {{stages: [h], slice: v7x-32}}\n", "kinds")
    (terraform.folder / "pools.tfvars").write_text(format_variables(layout, capacity))
    planned = terraform.plan("-var-file=pools.tfvars")
    pools = {values["name"]: values for address, values in planned.items() if ".tpu[" in address}
    target = Target("wan", "videos", "image", "2.60.0", capacity=capacity)
    slices = {}
    for group in kubernetes.build_cluster_spec(layout, target)["workerGroupSpecs"][1:]:
        kind = group["groupName"].rpartition("-")[0] if target.requests_slices else group["groupName"]
        slices[kind] = (group, slices.get(kind, (group, 0))[1] + group["maxReplicas"])
    names = set()
    for kind, (group, count) in slices.items():
        hosts, selector = group["numOfHosts"], group["template"]["spec"]["nodeSelector"]
        for name in [kind] if hosts == 1 else [f"{kind}-{number}" for number in range(count)]:
            names.add(name)
            pool, [node] = pools[name], pools[name]["node_config"]
            assert node["machine_type"] == selector["node.kubernetes.io/instance-type"]
            assert pool["autoscaling"][0]["max_node_count"] == (count if hosts == 1 else hosts)
            assert pool["autoscaling"][0]["min_node_count"] == pool["initial_node_count"] == 0
            assert node["spot"] == (capacity == "spot")
            assert (
                node["flex_start"]
                == (capacity in ("flex-start", "queued"))
                == (not pool["management"][0]["auto_repair"])
            )
            assert bool(pool["queued_provisioning"]) == (capacity == "queued")
            if hosts == 1:
                assert not pool["placement_policy"]
            elif node["machine_type"].startswith("tpu7x-"):
                assert pool["placement_policy"][0]["policy_name"] == f"wan-{kind}"
                policy = planned[f'google_compute_resource_policy.slices["{kind}"]']["workload_policy"][0]
                assert policy["accelerator_topology"] == selector["cloud.google.com/gke-tpu-topology"]
            else:
                topology = pool["placement_policy"][0]["tpu_topology"]
                assert topology == selector["cloud.google.com/gke-tpu-topology"]
    assert {*pools} == names


def test_reservation_is_for_on_demand_machines_alone(terraform):
    (terraform.folder / "pools.tfvars").write_text(format_variables(Layout.parse(KINDS, "kinds"), "on-demand"))
    planned = terraform.plan("-var-file=pools.tfvars", "-var=reservation=mine")
    [affinity] = planned['google_container_node_pool.tpu["v6e-8"]']["node_config"][0]["reservation_affinity"]
    assert (affinity["consume_reservation_type"], affinity["values"]) == ("SPECIFIC_RESERVATION", ["mine"])
    variables = ["-var=project=p", "-var=region=r", "-var=zone=z", "-var=reservation=mine", "-var=capacity=spot"]
    text, code = terraform.run("plan", "-no-color", "-input=false", "-var-file=pools.tfvars", *variables)
    assert code != 0 and "A reservation is for on-demand capacity" in text


def test_service_s_address_and_certificate_are_made_for_a_hostname_alone(terraform):
    assert not [address for address in terraform.plan() if "certificate" in address.split(".")[0]]
    (terraform.folder / "pools.tfvars").write_text(format_variables(Layout.load("one-machine"), "spot"))
    planned = terraform.plan("-var=hostname=videos.example.com", "-var-file=pools.tfvars")
    assert f"Apply complete! Resources: {len(planned)} added" in PAGE
    assert planned["google_certificate_manager_certificate_map_entry.service[0]"]["hostname"] == "videos.example.com"
    assert planned["google_compute_global_address.service[0]"]["name"] == "wan"
    assert planned["google_compute_ssl_policy.service[0]"]["min_tls_version"] == "TLS_1_2"
