"""docs/gke.md and docs/tpu-vm.md can be followed: what each command prints and costs, and every name before its use."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT

PAGE, TPU_VM = ((ROOT / "docs" / name).read_text() for name in ("gke.md", "tpu-vm.md"))
# These print nothing, nor does a command whose output goes to a file or to another program, or an ssh that runs none.
SILENT = ("export ", "cd ", "rm ")
TO_ELSEWHERE = re.compile(r"> [\w.]+$| \| \w+ -$| -- -N ")
COSTLY = (
    "clusters create",
    "node-pools create",
    "sql instances create",
    "addresses create wan",
    "docker push",
    "weights convert",
    "terraform apply",
    "secrets versions add",
    "create.sh",
)


def blocks_of(page):
    """Return the shell blocks with continued lines joined, and without the files that they write."""
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    return [re.sub(r"(<<EOF)\n.*?\nEOF\n", r"\1\n", text, flags=re.DOTALL).replace("\\\n", " ") for text in blocks]


def find_problems(page):
    """Yield the commands that don't say what they print or what they cost."""
    for block in blocks_of(page):
        for lines in re.findall(r"(?m)^[^#\n].*\n(?:#.*\n)*", block):
            command, *rest = lines.splitlines()
            plain = re.sub(r"\s+# .*|<<EOF", "", command)
            is_silent = plain.startswith(SILENT) or TO_ELSEWHERE.search(plain.strip())
            if not is_silent and not any(line.startswith("# ") for line in rest):
                yield f"what does it print? {command}"
            if any(words in plain for words in COSTLY) and not any(line.startswith("#$ ") for line in rest):
                yield f"what does it cost? {command}"


@pytest.mark.parametrize(("page", "prices"), [(PAGE, 14), (TPU_VM, 1)], ids=["gke", "tpu-vm"])
def test_every_command_is_followed_by_what_it_prints_and_costs(page, prices):
    assert not list(find_problems(page))
    assert len(re.findall(r"(?m)^#\$ .*(?:\d|nothing)", page)) >= prices


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("kubectl get pods", "what does it print?"),
        ("gcloud container clusters create wan \\\n    --num-nodes 1\n# NAME", "what does it cost?"),
        ("docker push $IMAGE\n#$ 1 a month", "what does it print?"),
    ],
)
def test_command_without_an_output_or_a_price_is_named(line, problem):
    [text] = find_problems(f"```sh\n{line}\n```")
    assert text.startswith(problem)


def find_missing_names(page, names):
    """Return the variables that are used before they are set, and add to names those that are set."""
    missing = []
    for line in "\n".join(blocks_of(page)).splitlines():
        if line.startswith("#"):
            continue
        settings = re.findall(r"(\w+)=(\$\(.*?\)\S*|\S+)", line) if line.startswith("export ") else []
        for name, value in settings or [(None, line)]:
            missing += [used for used in re.findall(r"\$([A-Z]\w*)", value) if used not in names]
            names.add(name)
    return missing


def test_names_are_set_before_they_are_used():
    names = {"PGPASSWORD"}  # The reader's own.
    assert not find_missing_names(PAGE, names)
    assert len(names) > 8
    assert not find_missing_names(TPU_VM, names)
    assert find_missing_names("```sh\nexport A=1 B=$A\nls $B $C\n```", set()) == ["C"]


def test_cluster_with_gateways_has_the_add_on_of_load_balancers():
    """gcloud disables every add-on that --addons doesn't name, and Gateways need this one."""
    [line] = [line for line in "\n".join(blocks_of(PAGE)).splitlines() if " clusters create " in line]
    assert "--gateway-api standard" in line
    assert {"HttpLoadBalancing", "RayOperator"} <= {*re.search(r"--addons (\S+)", line)[1].split(",")}


def test_overlay_for_locked_memory_changes_the_pods_with_tpus_alone(tmp_path):
    from cluster.layout import Layout
    from cluster.provision import kubernetes
    from cluster.provision.target import Target

    [patch] = re.findall(r"```yaml\n(patches:.*?)```", PAGE, re.DOTALL)
    cluster = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "wan-tpu"},
        "spec": kubernetes.build_cluster_spec(
            Layout.load("one-machine"), Target("wan-tpu", "default", "image", "2.60.0")
        ),
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(cluster))
    (tmp_path / "kustomization.yaml").write_text(f"resources: [base.yaml]\n{patch}")
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run([kubectl, "kustomize", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    groups = yaml.safe_load(done.stdout)["spec"]["workerGroupSpecs"]
    assert [group["groupName"] for group in groups] == ["cpu", "v6e-8"]
    security = [group["template"]["spec"]["containers"][0]["securityContext"] for group in groups]
    assert security[0] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert (security[1]["runAsUser"], security[1]["capabilities"]) == (0, {"drop": ["ALL"], "add": ["IPC_LOCK"]})
