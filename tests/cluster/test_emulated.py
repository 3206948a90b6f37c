"""Emulated clusters, `wan-tpu cluster` and `wan-tpu status`, as a person uses it: each command a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from actors import cli
from cluster.drawing import draw
from cluster.emulation import ray_nodes
from cluster.emulation.cluster import EmulatedCluster, EmulatedSlice, Settings
from cluster.errors import ClusterNotFound, ClusterStartFailed
from cluster.inventory import LiveHost, LiveSlice
from cluster.slice_spec import SliceSpec
from tests.children import run_command
from tests.conftest import ROOT
from tests.waiting import wait_for

ONE_POOL = """
emulate: {devices_per_host: 2}
pools:
  all: {stages: [encoder, denoise_high, denoise_low, decoder], slice: v6e-1}
"""


def run(*argv):
    done = run_command(*argv)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.long
def test_cluster_is_brought_up_shown_and_taken_down(tmp_path):
    layout = tmp_path / "mine.yaml"
    layout.write_text(ONE_POOL)
    folder = tmp_path / "state"
    code, out, err = run("cluster", "up", "--emulate", str(layout), "--folder", str(folder))
    try:
        assert code == 0, err
        state = json.loads((folder / "cluster.json").read_text())
        assert f"emulated cluster of 1 slices, 1 hosts: RAY_ADDRESS={state['address']}" in out
        # It lives on, and only on the loopback interface.
        processes = ray_nodes.processes(Path(state["temp"]))
        assert {"raylet", "gcs_server"} <= {process.name() for process in processes}
        listening = {c.laddr.ip for p in processes for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}
        # Where a job of this cluster looks for it, instead of among all processes of the machine.
        for node in ("head", "v6e-1-0-0"):
            assert (Path(state["temp"]) / node / "ray_current_cluster").read_text() == state["address"]

        code, out, err = run("cluster", "up", "--emulate", str(layout), "--folder", str(folder))
        assert (code, out) == (1, "")
        assert f"{folder} already" in err

        code, out, err = run("status", "--folder", str(folder))
        assert code == 0, err
        assert re.search(r"v6e-1-0 +emulated v6e-1 +free +\[ host 0  node ", out), out
        assert "2 CPU devices" in out
        assert f"jobs at http://{state['dashboard']}" in out
        assert "no pipeline" in out

        # What a crash leaves: no head, the other processes linger.
        next(process for process in processes if process.name() == "gcs_server").kill()
    finally:
        code, out, err = run("cluster", "down", "--folder", str(folder))
    assert (code, out) == (0, "stopped\n")
    assert not [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not Path(state["temp"]).exists()


OWNER = """
import sys, time
from pathlib import Path
from cluster.emulation.cluster import EmulatedCluster
running = EmulatedCluster.start((), folder=Path(sys.argv[1]))
print(running.temp, flush=True)
time.sleep(600)
"""


def test_a_cluster_starts_below_a_long_temporary_folder_and_ends_with_its_owner(tmp_path):
    command, env = [sys.executable, "-c", OWNER, str(tmp_path)], {**os.environ, "TMPDIR": str(tmp_path)}
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    assert owner.stdout is not None
    temp = Path(owner.stdout.readline().strip())
    assert len(f"{temp}/haproxy/{'0' * 56}/admin") <= 97  # Below a node's id; HAProxy refuses longer paths.
    processes = ray_nodes.processes(temp)
    assert "raylet" in {process.name() for process in processes}
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    wait_for(lambda: not any(process.is_running() for process in processes), "all of it gone")
    wait_for(lambda: not temp.exists(), "its files gone")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["cluster", "down"], r"there is no emulated cluster in \S+; give the --folder"),
        (["cluster", "up", "--emulate", "four-pools"], "four-pools.yaml: it is for real TPUs; add emulate"),
        (["status", "--address", "127.0.0.1:9"], "no Ray cluster answers at '127.0.0.1:9'"),
    ],
)
def test_errors_are_one_line(argv, message, tmp_path, capsys):
    assert cli.main([*argv, "--folder", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(message, err)


def test_a_damaged_state_file_is_named(tmp_path):
    (tmp_path / "cluster.json").write_text("{}")
    with pytest.raises(ClusterNotFound, match=r"cluster\.json"):
        EmulatedCluster.attach(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's file")
@pytest.mark.parametrize("of_another", ["state", "folder"])
def test_files_that_another_user_has_planted_are_neither_believed_nor_deleted(of_another, tmp_path):
    theirs, state = tmp_path / "theirs", tmp_path / "cluster.json"
    theirs.mkdir()
    state.write_text(json.dumps({"temp": str(theirs), "address": "127.0.0.1:1", "dashboard": None}))
    os.chown(state if of_another == "state" else theirs, 12345, 12345)
    with pytest.raises(ClusterNotFound, match="12345"):
        EmulatedCluster.attach(tmp_path)
    assert cli.main(["cluster", "down", "--folder", str(tmp_path)]) == 2
    assert theirs.is_dir()


def test_slices_need_names_of_their_own(tmp_path):
    twice = (EmulatedSlice("a", SliceSpec("v6e-1")), EmulatedSlice("a", SliceSpec("v6e-4")))
    with pytest.raises(ClusterStartFailed, match="a, a"):
        EmulatedCluster.start(twice, folder=tmp_path)


def test_a_machine_whose_name_leads_nowhere_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "nowhere.invalid")
    with pytest.raises(ClusterStartFailed, match=r"nowhere\.invalid.*/etc/hosts"):
        EmulatedCluster.start([], folder=tmp_path)


def test_no_cluster_starts_where_no_short_folder_can_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("cluster.emulation.cluster._SHORT", tmp_path / "nowhere")
    with pytest.raises(ClusterStartFailed, match="TMPDIR"):
        EmulatedCluster.start((), folder=tmp_path / "state")


def test_a_node_that_does_not_start_tells_the_end_of_its_logs(tmp_path, caplog):
    more_than_any_machine_has = Settings(head_store_mib=10**8)
    with pytest.raises(ClusterStartFailed, match=r"(?s)head.*\ngcs_server\.out: "):
        EmulatedCluster.start((EmulatedSlice("a", SliceSpec("v6e-1")),), more_than_any_machine_has, folder=tmp_path)
    assert not list(tmp_path.iterdir())
    assert "once more" not in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_a_node_with_a_process_that_hangs_or_dies_is_started_once_more(sent, cluster, tmp_path, monkeypatch, caplog):
    """By a process that has joined another cluster, and keeps to it."""
    from ray._private import services
    from ray.experimental import internal_kv

    joined = internal_kv.internal_kv_get_gcs_client()
    assert joined is not None

    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "2")
    start, calls = services.start_gcs_server, []

    def hit(*args, **kwargs):
        started = start(*args, **kwargs)
        if not calls:
            started.process.send_signal(sent)
        calls.append(started.process)
        return started

    monkeypatch.setattr(services, "start_gcs_server", hit)
    with EmulatedCluster.start((), folder=tmp_path) as cluster:
        assert len(calls) == 2
        assert "head didn't start" in caplog.text
        assert cluster.running
        assert calls[0].wait(5) == -signal.SIGKILL
    assert internal_kv.internal_kv_get_gcs_client() is joined


def test_a_drawing_shows_holders_and_missing_hosts():
    spec = SliceSpec("v5p-16")
    slices = [
        LiveSlice("big", "v5p-16", spec, (LiveHost(1, "b" * 56, "10.0.0.2", None),), None),
        LiveSlice("one", "v6e-1", SliceSpec("v6e-1"), (LiveHost(0, "c" * 56, "10.0.0.3", None),), "all/0"),
    ]
    drawn = draw(slices)
    assert "unusable  ┌ host 0  missing" in drawn
    assert "└ host 1  node bbbbbbbb at 10.0.0.2\n" in drawn
    assert len({line.index("host") for line in drawn.splitlines()[1:4]}) == 1  # Columns begin at the same place.
    assert "2 slices: 0 free, 1 taken, 1 with hosts missing" in drawn
    assert "emulated" not in drawn
    assert draw([]) == "no TPU hosts"
