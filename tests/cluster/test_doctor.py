"""`wan-tpu doctor --slice` on an emulated slice of two hosts."""

import json
import os
import subprocess
import sys

import pytest

from tests.cluster.conftest import TWO_HOSTS
from tests.conftest import ROOT


def run_doctor(cluster, folder, *more):
    command = [sys.executable, "-m", "actors.cli", "doctor", "--slice", TWO_HOSTS.name, "--address", cluster.address]
    command += ["--output", str(folder / "doctor.json"), *more]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
    report = folder / "doctor.json"
    return done, json.loads(report.read_text()) if report.exists() else None


def test_hosts_of_a_slice_are_checked_together(cluster, all_free, tmp_path):
    done, bundle = run_doctor(cluster, tmp_path, "--part", "collectives")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "4 of 'cpu': they stand in for chips" in done.stdout
    assert "process 0 of 2" in done.stdout
    for host in bundle["hosts"]:
        start, collectives = host
        assert (start["name"], collectives["name"]) == ("jax", "collectives")
        assert [finding["verdict"] for finding in collectives["findings"]] == ["ok"] * 5


@pytest.mark.soak  # Four minutes on two cores.
def test_everything_is_checked_on_both_hosts(cluster, all_free, tmp_path):
    done, bundle = run_doctor(cluster, tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for host in bundle["hosts"]:
        assert len(host) == 8
        assert not [finding for part in host for finding in part["findings"] if finding["verdict"] == "fail"]


def test_folder_that_hosts_do_not_have_is_named(cluster, all_free, tmp_path):
    done, bundle = run_doctor(cluster, tmp_path, "--part", "mp4", "--folder", str(tmp_path / "none"))
    assert (done.returncode, bundle) == (1, None)
    assert f"{tmp_path}/none is no folder on this host; make it there" in done.stderr
