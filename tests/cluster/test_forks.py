"""Workers that are forks of a process which has imported what they use: they are what they would be without."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from cluster.emulation import ray_nodes
from cluster.emulation.cluster import EmulatedCluster
from tests.conftest import ROOT
from tests.waiting import SECONDS

pytestmark = pytest.mark.thorough  # All other tests on emulated clusters use forks, too.

WORKERS = textwrap.dedent(
    """
    import json, os, random, sys
    import ray
    from cluster.connect import connect

    connect(sys.argv[1])

    class Worker:
        def said(self):
            module = sys.modules.get("imported")
            return {
                "imported_by": module and module.PID,
                "pid": os.getpid(),
                "parent": os.getppid(),
                "group": os.getpgrp(),
                "job": ray.get_runtime_context().get_job_id(),
                "told": os.environ.get("TOLD"),
                "folder": os.getcwd(),
                "nice": os.nice(0),
                "random": random.random(),
            }

        def end(self):
            os._exit(1)

    options = [json.loads(argument) for argument in sys.argv[2:]]
    workers = [ray.remote(num_cpus=0.1)(Worker).options(runtime_env=environment).remote() for environment in options]
    said = ray.get([worker.said.remote() for worker in workers])
    workers[0].end.remote()
    try:
        ray.get(workers[0].said.remote())
    except ray.exceptions.RayActorError:
        pass
    alive = ray.get([worker.said.remote() for worker in workers[1:]])
    assert [worker["pid"] for worker in alive] == [worker["pid"] for worker in said[1:]]
    print(json.dumps(said))
    """
)


@pytest.fixture(scope="module")
def module_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("modules") / "imported.py"
    path.write_text("import os\n\nPID = os.getpid()\n")
    return path


@pytest.fixture(scope="module")
def forking(module_file, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{module_file.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        with EmulatedCluster.start((), folder=tmp_path_factory.mktemp("cluster"), imports="imported") as running:
            yield running


def workers(cluster, *runtime_envs):
    """Start a worker in each runtime_env, end the first one, and return what each says about itself."""
    command = [sys.executable, "-c", WORKERS, cluster.address, *map(json.dumps, runtime_envs)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    output = done.stdout[done.stdout.index("[{") :]  # Ray may print something too, even in the middle of the line.
    return json.JSONDecoder().raw_decode(output)[0]


def server(cluster):
    [process] = [p for p in ray_nodes.processes(cluster.temp) if "cluster.emulation.fork_server" in p.cmdline()]
    return process


def test_a_fork_is_the_worker_that_it_stands_for(forking):
    same, changed, another = workers(
        forking,
        {},
        {"env_vars": {"TOLD": "this"}},
        {"env_vars": {"JAX_ENABLE_X64": "1"}},  # JAX reads it when it is imported
    )
    parent = server(forking).pid
    assert same["imported_by"] == changed["imported_by"] == same["parent"] == changed["parent"] == parent
    assert another["imported_by"] is None
    assert (same["told"], changed["told"]) == (None, "this")
    # A raylet ends a worker's whole process group with the worker.
    assert all(worker["group"] == worker["pid"] for worker in (same, changed, another))
    for name in ("job", "folder", "nice"):
        assert same[name] == another[name], name
    assert same["random"] != changed["random"]


def test_code_that_has_changed_is_imported_anew(forking, module_file):
    before = module_file.stat()
    os.utime(module_file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    try:
        assert workers(forking, {})[0]["imported_by"] is None
    finally:
        os.utime(module_file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_workers_start_without_the_server(forking):
    process = server(forking)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    [alone] = workers(forking, {})
    assert alone["imported_by"] is None
    assert alone["group"] == alone["pid"]
