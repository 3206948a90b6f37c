"""docs/gke.md and docs/tpu-vm.md can be followed: every name is set before its use, and what they add to pods works."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

from tests.conftest import ROOT

PAGE, TPU_VM = ((ROOT / "docs" / name).read_text() for name in ("gke.md", "tpu-vm.md"))


def blocks_of(page):
    """Return the shell blocks with continued lines joined, and without the files that they write."""
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    return [re.sub(r"(<<EOF)\n.*?\nEOF\n", r"\1\n", text, flags=re.DOTALL).replace("\\\n", " ") for text in blocks]


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
