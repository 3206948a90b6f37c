"""TPU VMs: scripts for every layout, and machines that boot with them in a network of their own."""

import os
import subprocess
import sys

import pytest

from actors.cli import main
from cluster.errors import LayoutError
from cluster.layout import Layout, list_shipped
from cluster.provision.tpu_vm import Machines, format_scripts
from tests.conftest import ROOT

MACHINES = Machines("wan", "project", "us-east5-b", "us-docker.pkg.dev/project/wan/wan-tpu:1", "wan@p.example")
INSIDE = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
# Cloud TPU's API has no v7x.
REAL = [name for name in list_shipped() if not name.startswith("emulated") and not name.endswith("v7x")]
LAYOUT = "pools:\n  all: {stages: [a], slice: v5p-16, replicas: {min: 1, max: 2}}\n"


@pytest.mark.parametrize("name", REAL)
def test_scripts_of_every_layout_are_shell(name, tmp_path, capsys):
    options = ["--image", "registry/wan-tpu:1", "--project", "p", "--zone", "z", "--spot", "--account", "a@b"]
    assert main(["hosts", str(tmp_path), "--layout", name, *options]) == 0
    layout = Layout.load(name)
    scripts = sorted(tmp_path.glob("*.sh"))
    assert len(scripts) == 3 + len({pool.slice.pod_type for pool in layout.pools})
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
        assert os.access(script, os.X_OK)
        of_a_host = script.stem not in ("create", "delete", "head")
        assert ("echo always > $hugepages" in script.read_text()) == of_a_host
    created = (tmp_path / "create.sh").read_text()
    assert created.count("queued-resources create") == layout.slices
    assert created.count("--spot") == layout.slices
    # The token is Secret Manager's alone: whoever may read a machine's metadata doesn't learn it.
    assert "secrets create wan-token --project p --replication-policy automatic --data-file token" in created
    assert "$(cat token)" not in created and "wan-tpu-token" not in created
    assert "create.sh" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{pools: {a: {stages: [x], slice: v7x-4}}}", "v7x-4.*v5e.*v5p.*v6e.*GKE"),
        ("{pools: {a: {stages: [x], slice: v6e-8}}, emulate: {devices_per_host: 1}}", "emulate"),
        ("{pools: {ends_1: {stages: [x], slice: v6e-8}, Ends-1: {stages: [y], slice: v6e-8}}}", "pools ends_1.*Ends-1"),
    ],
)
def test_what_is_not_to_be_had_is_refused(text, message):
    with pytest.raises(LayoutError, match=message):
        format_scripts(Layout.parse(text, "mine.yaml"), MACHINES)


@pytest.mark.parametrize(
    ("option", "message"), [("--name=my wan", "'my wan'"), ("--image=a; b", "a; b"), ("--account=$(id)", "$(id)")]
)
def test_names_that_a_shell_would_take_apart_are_refused(option, message, tmp_path, capsys):
    arguments = ["--layout", "four-pools", "--image", "i", "--project", "p", "--zone", "z", "--account", "a@b", option]
    assert main(["hosts", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_machines_join_one_cluster_and_leave_it_when_they_are_stopped(tmp_path):
    (tmp_path / "up").mkdir()
    (tmp_path / "work").mkdir()
    overlay = f"mount -t overlay overlay -o lowerdir=/etc,upperdir={tmp_path}/up,workdir={tmp_path}/work /etc"
    probe = f"ip link set lo up && iptables --policy INPUT DROP && {overlay}"
    if subprocess.run([*INSIDE, "bash", "-c", probe], capture_output=True).returncode:
        pytest.skip("a network and an /etc of its own are for root, with iproute2 and iptables")
    for name, content in format_scripts(Layout.parse(LAYOUT, "tests"), MACHINES).items():
        (tmp_path / name).write_text(content)
    command = [*INSIDE, sys.executable, "-m", "tests.cluster.tpu_vm_machines", str(tmp_path)]
    # Without what this process has told Ray of emulated clusters, which are on the loopback interface alone.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    logs = "".join(f"\n---- {log}\n{log.read_text()[-2000:]}" for log in tmp_path.glob("*.log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}{logs}"
    assert "slice-a" in done.stdout
    assert '"hosts": ["10.0.0.3", "10.0.0.2"]' in done.stdout  # by worker id, not by when they came
    assert 'left: {"stopped": true}' in done.stdout
