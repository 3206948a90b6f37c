"""All uses of Ray outside its public interface, which any version may change (pyproject.toml pins Ray).

Each function says what Ray lacks, and has a test in tests/cluster/test_ray_private.py that fails once Ray no longer
lacks it. Ray is imported inside the functions, because it reads its settings from the environment when it is imported.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


def reread_settings() -> None:
    """Make Ray read its settings from the environment again; it reads those of its C++ library once per process."""
    from ray._raylet import Config  # type: ignore[attr-defined]  # It is compiled.

    Config.initialize("")


def get_token_loader() -> Any:
    """Return the object that finds and caches the user's token for Ray's C++ library."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # It is compiled.

    return AuthenticationTokenLoader.instance()


def forbid_clusters_of_its_own() -> None:
    """Keep Ray from starting a cluster here once this process has left the one that it joins.

    Any call of Ray starts one if there is none, and a Serve handle asks for its replicas' metrics every few seconds in
    a thread. Ray reads RAY_ENABLE_AUTO_CONNECT only when it is imported.
    """
    from ray._private import auto_init_hook

    auto_init_hook.enable_auto_connect = False


def keep_loopback_addresses() -> None:
    """Keep Ray from replacing a loopback address with the machine's own, on which an emulated cluster doesn't listen.

    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER is the only setting for this, and Ray reads it only when it is imported.
    """
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False


def forget_serve() -> None:
    """Forget the Serve controller of a cluster that this process has left.

    Serve caches a handle of the controller and would use it in the next cluster if the job's number is the same, as it
    is for the first job of every cluster.
    """
    if "ray.serve.context" in sys.modules:
        sys.modules["ray.serve.context"]._disconnect()


def serve_client() -> Any:
    """Return Serve's client for this cluster, which Serve's public calls use from then on; None if Serve doesn't run.

    The client knows where Serve's proxy listens, which no public call returns.
    """
    from ray.serve import context

    context._check_cached_client_alive()  # Forgets a Serve that another process has shut down.
    return context._get_global_client(raise_if_no_controller_running=False)


def knows_deployment(handle: Any) -> bool:
    """Return whether a handle knows its deployment, so that calls don't wait until it does.

    The public `running_replicas_populated` is also true if only the replicas are known, and calls then wait for ever.
    """
    return bool(handle._router._asyncio_router._request_router_initialized.is_set())


def list_draining_nodes(timeout_s: float) -> dict[str, int]:
    """Return when each node that is being drained will be gone, in ms since 1970; 0 without a deadline.

    Ray Train's own watcher of preemptions calls `ray._private.state`, which asks the same client without a time-out.
    """
    from ray._private.worker import global_worker

    worker: Any = global_worker
    drained: dict[str, int] = worker.gcs_client.get_draining_nodes(timeout=timeout_s)
    return drained


def get_node_class() -> Any:
    """Return Ray's class of a node.

    `ray start` takes longer, and starts a node's processes from a process of its own, where `start_processes_by` has no
    effect.
    """
    from ray._private.node import Node

    return Node


def get_node_parameters(**settings: Any) -> Any:
    """Return the parameters that the class of a node takes."""
    from ray._private.parameter import RayParams

    make: Any = RayParams  # Ray annotates some of these wrongly.
    return make(**settings)


def write_address(address: str, folder: str) -> None:
    """Write a cluster's address where its jobs look for it, as `ray start` does.

    `ray.cluster_utils.Cluster` would overwrite the address by which the machine's other clusters are found.
    """
    from ray._private.utils import write_ray_address

    write_ray_address(address, folder)


def start_processes_by(popen: Any) -> None:
    """Make Ray start the processes of nodes with `popen` in place of `subprocess.Popen`.

    Ray blocks SIGINT in Python code that runs in the child, which is forked from a process with threads. Now and then
    such a child hung before it executed its program (a raylet without a log, twice in a row).
    """
    from ray._private import services

    patched: Any = services
    patched.ConsolePopen = popen


@contextlib.contextmanager
def keep_joined_cluster() -> Iterator[None]:
    """Keep this process connected to the cluster that it has joined, if any, while it starts nodes of another one.

    After starting a node, Ray uses that node's cluster in some calls (`Node._init_gcs_client`), and ends this process
    once that cluster has ended.
    """
    from ray.experimental import internal_kv

    joined = internal_kv.internal_kv_get_gcs_client()
    try:
        yield
    finally:
        if joined is not None:
            internal_kv._initialize_internal_kv(joined)


def read_worker_arguments(arguments: list[str]) -> tuple[Any, list[str], bool]:
    """Do what Ray's `setup_worker.py` does before it becomes a worker, because raylets start all workers with it.

    Returns:
        The runtime environment, for `exec_worker`; the worker's own arguments; and whether the environment needs
        another Python.
    """
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray._private.workers import setup_worker

    known, command = setup_worker.parser.parse_known_args(arguments)
    context = RuntimeEnvContext.deserialize(known.serialized_runtime_env_context or "{}")
    update_envs(context.env_vars)
    context.env_vars = {}
    return context, command, vars(context) != vars(RuntimeEnvContext())


def exec_worker(context: Any, arguments: list[str]) -> None:
    """Become a worker in a new Python."""
    from ray.core.generated import common_pb2

    context.exec_worker(arguments, common_pb2.PYTHON)  # type: ignore[attr-defined]  # It is generated.
