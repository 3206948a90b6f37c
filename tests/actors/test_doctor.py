"""`wan-tpu doctor`, rehearsed on CPU devices: it finds nothing wrong, and names each fault that is put in."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

from actors.cli import main
from actors.doctor import executables
from actors.doctor.examination import examine
from actors.doctor.finding import Machine
from actors.doctor.kernels import check_kernels
from actors.planning.calibration import load_calibration
from tests.conftest import ROOT, with_devices
from wan_tpu.errors import InvalidInput
from wan_tpu.ops import self_check
from wan_tpu_kernels.catalogue import KERNELS


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path, is_rehearsal=True)


def list_findings(machine, *parts):
    return [finding for part in examine(machine, parts, lambda part, finding: None) for finding in part.findings]


def run_doctor(folder, *parts, **environment):
    chosen = [word for part in parts for word in ("--part", part)]
    command = [sys.executable, "-m", "actors.cli", "doctor", "--disk", folder, "--output", folder / "doctor.json"]
    done = subprocess.run(
        [*command, *chosen], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    return done, (folder / "doctor.json").read_text()


def check_rehearsal(folder, *parts):
    done, bundle = run_doctor(folder, *parts, JAX_TEST_TOKEN="a secret", JAX_TEST_LEVEL="4")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stderr == ""
    assert "4 of 'cpu'" in done.stdout
    assert "0 failed" in done.stdout or "no problems found" in done.stdout
    assert "a secret" not in bundle
    report = json.loads(bundle)
    assert report["environment"]["JAX_TEST_LEVEL"] == "4"
    assert report["versions"]["jax"] and report["devices"]["rehearsal"]
    with pytest.raises(InvalidInput, match=r"\bcpu\b"):
        load_calibration(folder / "doctor.json")
    assert report["calibration"]["link_bytes_per_s"] > 0 and report["date"]
    assert not [file for file in folder.iterdir() if file.name != "doctor.json"]
    [parts] = report["hosts"]
    return {part["name"]: [finding["verdict"] for finding in part["findings"]] for part in parts}


def test_rehearsal_of_what_needs_no_model_finds_nothing_wrong(tmp_path):
    verdicts = check_rehearsal(tmp_path, "collectives", "executables", "mp4")
    assert list(verdicts) == ["jax", "collectives", "executables", "mp4"]
    assert verdicts["collectives"] == [*["ok"] * 5, "info"]
    assert verdicts["executables"] == ["ok"]


@pytest.mark.thorough
def test_rehearsal_of_everything_finds_nothing_wrong(tmp_path):
    verdicts = check_rehearsal(tmp_path)
    assert list(verdicts) == ["host", "jax", "rates", "collectives", "kernels", "model", "executables", "mp4", "step"]
    assert set(verdicts["kernels"]) == set(verdicts["model"]) == {"ok"}
    assert len(verdicts["kernels"]) >= len(KERNELS)  # each at least once
    assert verdicts["step"] == ["info"] * 2  # Nothing is predicted of CPU devices.


def test_kernel_that_is_off_by_a_tile_is_named(machine, monkeypatch):
    attention = self_check.KERNELS["attention"]

    def shift(*arrays, **options):
        return jnp.roll(attention.run(*arrays, **options), 16, axis=0)

    monkeypatch.setitem(self_check.KERNELS, "attention", attention._replace(run=shift))
    finding = next(check_kernels(machine))
    assert (finding.name, finding.verdict) == ("attention", "fail")
    assert "--kernels reference:attention" in finding.advice


SWAPPED = """
import sys, jax
from pathlib import Path
right = jax.lax.all_to_all
pairs = [(0, 1), (1, 0), (2, 2), (3, 3)]
jax.lax.all_to_all = lambda x, axis, **of: jax.lax.ppermute(right(x, axis, **of), axis, pairs)
from actors.doctor.collectives import check_collectives
from actors.doctor.finding import Machine
for finding in check_collectives(Machine(Path(sys.argv[1]), is_rehearsal=True)):
    print(finding.name, finding.verdict, finding.measured)
"""


def test_collective_that_swaps_two_devices_is_named_with_them(tmp_path):
    command = [sys.executable, "-c", SWAPPED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=with_devices(4), capture_output=True, text=True, check=True)
    first, *others = done.stdout.splitlines()
    assert first == "all-to-all fail wrong on device 0, device 1"
    assert len(others) == 5 and not [line for line in others if " fail " in line]


def test_executable_of_another_flag_set_is_named_with_the_flag(tmp_path, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_other=true")
    executables.compile_to(tmp_path / "programs")
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    finding = executables.load("compiled elsewhere", tmp_path / "programs")
    assert finding.verdict == "fail"
    assert finding.measured == "not used: LIBTPU_INIT_ARGS is absent, was --xla_tpu_other=true"


def test_full_disk_is_named(tmp_path):
    inside = ["unshare", "--mount", "bash", "-c"]
    mount = f"mount -t tmpfs -o size=4m tmpfs {tmp_path}"
    if subprocess.run([*inside, mount], capture_output=True).returncode:
        pytest.skip("to mount a small disk is for root")
    command = f"{mount} && {sys.executable} -m actors.cli doctor --disk {tmp_path} --part host --output /dev/null"
    done = subprocess.run([*inside, command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert "FAIL disk" in done.stdout and "No space left on device" in done.stdout
    assert str(tmp_path) in done.stdout


def test_one_worker_of_a_larger_slice_is_told_what_to_run(machine, monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "t1v-0,t1v-1")
    findings = list_findings(machine, "rates", "kernels")
    assert [finding.verdict for finding in findings] == ["fail", "fail"]
    assert findings[0].measured == "this is one of 2 hosts of a TPU slice"
    assert "Ray" in findings[0].advice


def test_check_that_fails_itself_is_a_finding_and_stops_no_other(machine, monkeypatch):
    monkeypatch.setattr("actors.doctor.host.check_host", lambda machine: 1 / 0)
    broken, encoding = list_findings(machine, "host", "mp4")
    assert (broken.name, broken.verdict) == ("host", "fail")
    assert "ZeroDivisionError" in broken.measured and "attach the report" in broken.advice
    assert encoding.name == "mp4"


def test_folder_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["doctor", "--disk", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_tpu_that_jax_passes_over_is_no_rehearsal(tmp_path, monkeypatch):
    """JAX goes on on the CPU where libtpu isn't installed, or doesn't start."""
    monkeypatch.setattr("actors.doctor.jax_start.list_device_files", lambda: ["/dev/vfio/0"])
    monkeypatch.delenv("JAX_PLATFORMS")
    findings = list_findings(Machine(tmp_path), "jax", "kernels")
    assert [finding.verdict for finding in findings] == ["fail"]
    assert "/dev/vfio/0" in findings[0].measured
