"""Why we use what isn't public in Ray and JAX: a test that fails says that there may be a public way by now."""

import asyncio
import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import jax.distributed
import ray
import ray.util.state
from ray import serve
from ray._private import services
from ray._private.node import Node
from ray._private.state import GlobalState
from ray.cluster_utils import Cluster
from ray.serve._private.common import DeploymentTargetInfo
from ray.serve._private.router import AsyncioRouter
from ray.serve.schema import ServeStatus


def run_code(code, environment=os.environ):
    """Return what another process prints, in which nothing of Ray has been used yet."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


def test_ray_reads_its_settings_only_when_it_is_imported():
    code = """
import os, ray
from ray._private import auto_init_hook, ray_constants
from ray._raylet import AuthenticationMode, get_authentication_mode
from cluster import ray_private
def show():
    is_token = get_authentication_mode() == AuthenticationMode.TOKEN
    print(is_token, auto_init_hook.enable_auto_connect, ray_constants.ENABLE_RAY_CLUSTER)
os.environ |= {"RAY_AUTH_MODE": "disabled"}
ray_private.reread_settings()
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_ENABLE_AUTO_CONNECT": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
show()
ray_private.reread_settings()
ray_private.forbid_clusters_of_its_own()
ray_private.keep_loopback_addresses()
show()
"""
    # Without the settings that clusters of other tests have left in this process.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    assert run_code(code, environment) == ["False", "True", "True", "True", "False", "False"]


def test_serve_keeps_its_client_when_ray_is_shut_down(cluster):
    code = f"""
from ray.serve import context
from cluster.connect import connect, leave
connect("{cluster.address}")
context._set_global_client("that of this cluster")
import ray
ray.shutdown()
print(context._global_client is not None)
connect("{cluster.address}")
leave()
print(context._global_client is not None)
"""
    assert run_code(code) == ["True", "False"]


def test_serve_does_not_say_where_its_proxy_listens():
    assert set(ServeStatus.__dataclass_fields__) == {"proxies", "applications", "target_capacity"}
    assert not [name for name in dir(serve) if "client" in name.lower() or "address" in name.lower()]


def test_handle_that_knows_replicas_may_not_know_its_deployment():
    router = object.__new__(AsyncioRouter)
    router._request_router = router._request_router_class = None
    router._request_router_initialized = asyncio.Event()
    router._metrics_manager = SimpleNamespace(_update_running_replicas=lambda replicas: None)
    router.update_deployment_targets(DeploymentTargetInfo(is_available=True, running_replicas=["one"]))
    assert router.running_replicas_populated()
    assert not router._request_router_initialized.is_set()


def test_ray_says_nothing_of_draining_nodes_in_time():
    public = {name for module in (ray, ray.util, ray.util.state) for name in dir(module)}
    assert not [name for name in public if "drain" in name.lower()]
    assert not [name for name in inspect.signature(GlobalState.get_draining_nodes).parameters if "timeout" in name]


def test_ray_blocks_sigint_by_python_in_a_forked_child():
    assert "preexec_fn=preexec_fn" in inspect.getsource(services.start_ray_process)


def test_ray_writes_addresses_in_its_commands_and_test_clusters_only():
    assert "write_ray_address" not in inspect.getsource(Node)
    assert "write_ray_address(self.head_node.gcs_address)" in inspect.getsource(Cluster)


def test_ray_takes_the_cluster_of_a_started_node_for_its_own():
    assert "_initialize_internal_kv" in inspect.getsource(Node._init_gcs_client)


def test_ray_starts_workers_by_its_own_program_only():
    assert "setup_worker" in inspect.getsource(services.start_raylet)


def test_jax_lets_no_other_process_than_the_first_coordinate():
    """So `_emulate_joined` (cluster/gang/host_actor.py) changes the index of a process that has joined."""
    assert {name for name in dir(jax.distributed) if not name.startswith("_")} == {
        "initialize", "is_initialized", "shutdown",
    }  # fmt: skip
    assert not [name for name in inspect.signature(jax.distributed.initialize).parameters if "coordinates" in name]
