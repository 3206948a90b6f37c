"""`wan-tpu doctor --slice` on an emulated slice of two hosts."""

import json

import pytest
import ray

from cluster.slice_spec import DEVICES, WORKER_ID
from tests.children import run_command
from tests.cluster.conftest import CHIPS, TWO_HOSTS
from tests.waiting import wait_for


def run_doctor(cluster, folder, *more):
    where = ["--slice", TWO_HOSTS.name, "--address", cluster.address, "--output", folder / "doctor.json"]
    done = run_command("doctor", *where, *more)
    report = folder / "doctor.json"
    return done, json.loads(report.read_text()) if report.exists() else None


@pytest.mark.long
def test_hosts_of_a_slice_are_checked_together(cluster, all_free, tmp_path):
    done, bundle = run_doctor(cluster, tmp_path, "--part", "collectives")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "4 of 'cpu'" in done.stdout
    assert "process 0 of 2" in done.stdout
    for host in bundle["hosts"]:
        start, collectives = host
        assert (start["name"], collectives["name"]) == ("jax", "collectives")
        assert [finding["verdict"] for finding in collectives["findings"]] == [*["ok"] * 5, "info"]


@pytest.mark.thorough  # Four minutes on two cores.
def test_everything_is_checked_on_both_hosts(cluster, all_free, tmp_path):
    done, bundle = run_doctor(cluster, tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for host in bundle["hosts"]:
        assert len(host) == 9
        assert not [finding for part in host for finding in part["findings"] if finding["verdict"] == "fail"]


@pytest.mark.thorough
def test_folder_that_hosts_do_not_have_is_named(cluster, all_free, tmp_path):
    done, bundle = run_doctor(cluster, tmp_path, "--part", "mp4", "--disk", str(tmp_path / "none"))
    assert (done.returncode, bundle) == (1, None)
    assert f"{tmp_path}/none" in done.stderr


@pytest.mark.thorough
def test_worker_with_the_wrong_index_is_named(cluster, all_free, tmp_path):
    cluster.kill_host("two", 1)
    wait_for(lambda: ray.available_resources().get("TPU") == CHIPS - TWO_HOSTS.chips_per_host, "Ray has noticed")
    labels = TWO_HOSTS.build_host_labels(1, "two") | {DEVICES: "2"}
    try:
        node = cluster.add_host("two", 1, variables={"TPU_WORKER_ID": "0"})
        done, _ = run_doctor(cluster, tmp_path, "--part", "jax")
        assert done.returncode == 1, (done.stdout, done.stderr)
        assert f"host 1 of 2 (two, node {node[:8]} at 127.0.0.1" in done.stderr
        assert (
            "is worker 0 of its TPU slice according to its machine (TPU_WORKER_ID), but worker 1 according"
            in done.stderr
        )
        cluster.kill_host("two", 1)
        wait_for(lambda: ray.available_resources().get("TPU") == CHIPS - TWO_HOSTS.chips_per_host, "Ray has noticed")
        twin = cluster.add_host("two", 1, labels=labels | {WORKER_ID: "0"})
        done, _ = run_doctor(cluster, tmp_path, "--part", "jax")
        assert done.returncode == 1, (done.stdout, done.stderr)
        assert "ray.io/tpu-worker-id 0 to 1" in done.stderr
        assert f"0 on node {twin[:8]} at 127.0.0.1" in done.stderr
    finally:
        cluster.kill_host("two", 1)
        wait_for(lambda: ray.available_resources().get("TPU") == CHIPS - TWO_HOSTS.chips_per_host, "Ray has noticed")
        cluster.add_host("two", 1)
