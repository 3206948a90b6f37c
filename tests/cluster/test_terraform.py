"""The Terraform module: the provider takes its arguments, and its node pools are those of a layout."""

import functools
import re

import hcl2
import pytest
import yaml
from hcl2.utils import SerializationOptions

from cluster.errors import LayoutError
from cluster.layout import Layout
from cluster.provision import kubernetes
from cluster.provision.node_pools import format_variables
from cluster.provision.target import CAPACITIES, Target
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
    with pytest.raises(LayoutError):
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
