"""The Terraform module: its resources have arguments that the provider takes, and its node pools are those of a layout.

Where there is a terraform, it validates and plans the module with the Google provider's types, without a network.
"""

import functools
import json
import os
import re
import shutil
import subprocess

import hcl2
import pytest
import yaml
from hcl2.utils import SerializationOptions

from cluster.errors import LayoutError
from cluster.layout import Layout
from cluster.provision import kubernetes
from cluster.provision.node_pools import format_variables
from cluster.provision.target import CAPACITIES, Target
from tests.cluster.terraform_provider import serve_provider
from tests.cluster.test_kubernetes import KINDS
from tests.conftest import ROOT

FILES = {file.name: file.read_text() for file in sorted((ROOT / "cluster" / "terraform").glob("*.tf"))}
KNOWN = yaml.safe_load((ROOT / "tests" / "cluster" / "terraform" / "google.yaml").read_text())
PAGE = (ROOT / "docs" / "gke.md").read_text()
# Arguments that Terraform itself has for every resource.
OF_TERRAFORM = {"count", "depends_on", "for_each", "lifecycle", "provider"}
OPTIONS = SerializationOptions(strip_string_quotes=True, with_comments=False)


@functools.cache
def parse(text):
    return hcl2.loads(text, serialization_options=OPTIONS)


def resources_of(text):
    """Yield the type, the name and the content of each resource."""
    for block in parse(text).get("resource", ()):
        for kind, resources in block.items():
            for name, content in resources.items():
                yield kind, name, content


def is_block(value):
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and "__is_block__" in item for item in value)
    )


def split(content):
    """Return the arguments of a resource or a block, and the blocks in it by their names."""
    arguments = {name for name, value in content.items() if not is_block(value)} - {"__is_block__", "dynamic"}
    blocks = {name: value for name, value in content.items() if is_block(value) and name != "dynamic"}
    for dynamic in content.get("dynamic", ()):
        for name, block in dynamic.items():
            if name != "__is_block__":
                blocks.setdefault(name, []).extend(block["content"])
    return arguments, blocks


def problems_of(where, content, known):
    """Yield what the provider would refuse of a resource, or of a block in one."""
    arguments, blocks = split(content)
    required = set(known.get("required", ()))
    for name in sorted(arguments - required - {*known.get("optional", ())} - OF_TERRAFORM):
        yield f"{where} has no argument {name}"
    for name in sorted(required - arguments):
        yield f"{where} lacks {name}"
    known_blocks = known.get("blocks", {})
    for name in sorted(name for name, block in known_blocks.items() if block.get("is_required") and name not in blocks):
        yield f"{where} lacks the block {name}"
    for name, contents in blocks.items():
        if name in OF_TERRAFORM:
            continue
        if name not in known_blocks:
            yield f"{where} has no block {name}"
            continue
        for block in contents:
            yield from problems_of(f"{where} {name}", block, known_blocks[name])


def problems_of_text(text):
    for kind, name, content in resources_of(text):
        if kind not in KNOWN:
            yield f"{kind} isn't in google.yaml"
        else:
            yield from problems_of(f"{kind}.{name}", content, KNOWN[kind])


@pytest.mark.parametrize("name", FILES)
def test_provider_takes_every_argument(name):
    assert not list(problems_of_text(FILES[name]))


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        (
            "tpu_pools.tf",
            "disk_size_gb",
            "disk_size",
            "google_container_node_pool.tpu node_config has no argument disk_size",
        ),
        ("tpu_pools.tf", 'dynamic "queued_provisioning"', 'dynamic "queued"', "has no block queued"),
        ("tpu_pools.tf", 'type         = "COMPACT"', "", "google_container_node_pool.tpu placement_policy lacks type"),
        (
            "tpu_pools.tf",
            "      enabled = true",
            "",
            "google_container_node_pool.tpu queued_provisioning lacks enabled",
        ),
        ("cluster.tf", "  release_channel {", "  release_channels {", "has no block release_channels"),
        (
            "database.tf",
            'database_version    = "POSTGRES_17"',
            "",
            "google_sql_database_instance.wan lacks database_version",
        ),
        (
            "secrets.tf",
            "  replication {\n    auto {}\n  }\n",
            "",
            "google_secret_manager_secret.environment lacks the block",
        ),
        (
            "storage.tf",
            "google_storage_bucket",
            "google_storage_buckets",
            "google_storage_buckets isn't in google.yaml",
        ),
    ],
)
def test_mistake_is_found(file, old, new, problem):
    assert old in FILES[file]
    assert any(problem in text for text in problems_of_text(FILES[file].replace(old, new)))


def references_of(text):
    """Return what expressions refer to: variables, locals, and resources with the attributes that are read."""
    text = re.sub(r"#.*", "", text)
    variables = set(re.findall(r"\bvar\.(\w+)", text))
    values = set(re.findall(r"\blocal\.(\w+)", text))
    resources = set(re.findall(r"\b(google_\w+)\.(\w+)(?:\[[^\]]*\]+)*(?:\.(\w+))?", text))
    return variables, values, resources


def test_everything_that_is_referred_to_exists():
    text = "\n".join(FILES.values())
    variables, values, resources = references_of(text)
    assert variables == {name for block in parse(text)["variable"] for name in block}
    assert values == {name for block in parse(text)["locals"] for name in block} - {"__is_block__"}
    defined = {(kind, name) for kind, name, _ in resources_of(text)}
    assert {(kind, name) for kind, name, _ in resources} <= defined
    for kind, name, attribute in resources:
        allowed = {*KNOWN[kind].get("attributes", ()), *KNOWN[kind].get("required", ()), *KNOWN[kind].get("blocks", ())}
        assert attribute in allowed | {""}, f"{kind}.{name} has no {attribute}"


def test_reference_to_nothing_is_found():
    variables, values, resources = references_of(
        "a = var.b + local.c\nd = [google_x_y.z[0].id, google_x_y.w[*].name] # var.e"
    )
    assert (variables, values) == ({"b"}, {"c"})
    assert resources == {("google_x_y", "z", "id"), ("google_x_y", "w", "name")}


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_node_pools_are_those_that_pods_select(capacity):
    layout = Layout.parse(KINDS, "kinds")
    variables = parse(format_variables(layout, capacity))
    declared = {name: block[name] for block in parse(FILES["variables.tf"])["variable"] for name in block}
    assert {*variables} <= {*declared}
    assert variables["capacity"] == capacity
    assert f'"{capacity}"' in declared["capacity"]["validation"][0]["condition"]
    groups = {}
    target = Target("wan", "videos", "image", "2.60.0", capacity=capacity)
    for group in kubernetes.build_cluster_spec(layout, target)["workerGroupSpecs"][1:]:
        selector = group["template"]["spec"]["nodeSelector"]
        key = (
            selector["node.kubernetes.io/instance-type"],
            selector["cloud.google.com/gke-tpu-topology"],
            group["numOfHosts"],
        )
        groups[key] = groups.get(key, 0) + group["maxReplicas"]
    pools = {
        (pool["machine_type"], pool["topology"], pool["hosts"]): pool["slices"]
        for pool in variables["tpu_pools"].values()
    }
    assert pools == groups
    fields = re.findall(
        r"(\w+)\s*=\s*(?:string|number)", FILES["variables.tf"].split('"tpu_pools"')[1].split("default")[0]
    )
    assert all({*pool} == {*fields} for pool in variables["tpu_pools"].values())


def test_node_pools_of_emulated_slices_are_refused():
    with pytest.raises(LayoutError, match="its slices are emulated"):
        format_variables(Layout.load("emulated-demo"), "spot")


def test_pods_and_module_agree_on_their_names():
    """On Cloud SQL's user, the database, and the pods' Kubernetes account."""
    from cluster.provision.cloud_sql import DATABASE, build_address

    contents = {(kind, name): content for text in FILES.values() for kind, name, content in resources_of(text)}
    assert contents["google_sql_database", "jobs"]["name"] == DATABASE
    assert build_address("wan-tpu@p.iam.gserviceaccount.com") == (
        "postgresql://wan-tpu%40p.iam@127.0.0.1:5432/jobs?sslmode=disable"
    )
    assert 'trimsuffix(google_service_account.pods.email, ".gserviceaccount.com")' in FILES["database.tf"]
    assert 'default     = { namespace = "default", account = "wan-tpu" }' in FILES["variables.tf"]
    thp = contents["google_container_node_pool", "tpu"]["node_config"][0]["linux_node_config"][0]
    assert f"transparentHugepageEnabled: {thp['transparent_hugepage_enabled']}" in PAGE


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
