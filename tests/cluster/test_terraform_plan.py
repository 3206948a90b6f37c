"""Terraform itself validates and plans the module with the Google provider's types, without a network."""

import json
import os
import re
import shutil
import subprocess

import pytest
import yaml

from cluster.errors import LayoutError
from cluster.layout import Layout
from cluster.provision import kubernetes
from cluster.provision.cloud_sql import DATABASE, build_address
from cluster.provision.node_pools import format_variables
from cluster.provision.target import CAPACITIES, Target
from tests.cluster.terraform_provider import serve_provider
from tests.cluster.test_kubernetes import KINDS
from tests.conftest import ROOT

FILES = {file.name: file.read_text() for file in sorted((ROOT / "cluster" / "terraform").glob("*.tf"))}
KNOWN = yaml.safe_load((ROOT / "tests" / "cluster" / "terraform" / "google.yaml").read_text())
PAGE = (ROOT / "docs" / "gke.md").read_text()


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
    "capacity",
    [pytest.param(each, marks=() if each in ("on-demand", "queued") else pytest.mark.thorough) for each in CAPACITIES],
)
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


def test_pods_and_module_agree_on_their_names(terraform):
    """On Cloud SQL's user, the database, and the pods' Kubernetes account."""
    (terraform.folder / "pools.tfvars").write_text(format_variables(Layout.parse(KINDS, "kinds"), "spot"))
    planned = terraform.plan("-var-file=pools.tfvars")
    assert planned["google_sql_database.jobs"]["name"] == DATABASE
    assert build_address("wan-tpu@p.iam.gserviceaccount.com") == (
        "postgresql://wan-tpu%40p.iam@127.0.0.1:5432/jobs?sslmode=disable"
    )
    assert 'trimsuffix(google_service_account.pods.email, ".gserviceaccount.com")' in FILES["database.tf"]
    assert 'default     = { namespace = "default", account = "wan-tpu" }' in FILES["variables.tf"]
    nodes = planned['google_container_node_pool.tpu["v6e-8"]']["node_config"][0]["linux_node_config"][0]
    assert f"transparentHugepageEnabled: {nodes['transparent_hugepage_enabled']}" in PAGE


def test_destroy_is_not_refused_for_what_the_module_and_a_service_have_left_in_each_other(terraform):
    """Cloud SQL keeps its connection for four days, pods are connected to the database, and its user owns tables."""
    planned = terraform.plan()
    policies = {address.split(".")[0]: values.get("deletion_policy") for address, values in planned.items()}
    assert {kind: policy for kind, policy in policies.items() if policy} == {
        "google_service_networking_connection": "REMOVE_PEERING",
        "google_sql_database": "ABANDON",
        "google_sql_user": "ABANDON",
    }
    # The provider has had that policy since this version.
    assert re.search(r'version = "~> 8\.7"', FILES["versions.tf"])


def test_deletion_is_protected_by_one_variable_alone(terraform):
    for arguments, protection in (([], True), (["-var=deletion_protection=false"], False)):
        planned = terraform.plan(*arguments)
        protected = {address.split(".")[0]: values.get("deletion_protection") for address, values in planned.items()}
        assert {kind: value for kind, value in protected.items() if value is not None} == {
            "google_container_cluster": protection,
            "google_sql_database_instance": protection,
        }


def test_node_pools_of_emulated_slices_are_refused():
    with pytest.raises(LayoutError):
        format_variables(Layout.load("emulated-demo"), "spot")


def test_module_makes_what_the_commands_of_the_docs_make():
    page, text = PAGE, "\n".join(FILES.values())
    services = set(re.findall(r"\w+\.googleapis\.com", re.search(r"gcloud services enable (.*\n.*)\n", page)[1]))
    roles = set(re.findall(r"--role (roles/[\w.]+)", page))
    machines = set(re.findall(r"node-pools create cpu .*--machine-type (\S+)", page))
    databases = set(re.findall(r"--database-version (\S+)|sql databases create (\S+)|(db-custom-\S+)", page))
    databases = {name for names in databases for name in names if name}
    addons = set(re.findall(r"--database-flags ([\w.]+)=on", page))
    assert len(services) == 6 and len(roles) == 6 and len(machines | addons) == 2 and len(databases) == 3
    missing = [name for name in services | roles | machines | databases | addons if f'"{name}"' not in text]
    assert not missing
