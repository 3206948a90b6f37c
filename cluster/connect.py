"""Join a Ray cluster as a driver."""

import contextlib
import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

from cluster.authentication import use_token
from cluster.errors import ClusterNotFound


def connect(address: str) -> None:
    """Join the Ray cluster whose GCS listens on `address` ("host:port"); do nothing when already joined.

    Raises `ClusterNotFound` when nothing answers there.
    """
    stay_on_loopback(address)
    import ray  # after the line above: Ray reads its settings when it is imported
    from ray._private import auto_init_hook

    _check_answers(address)
    if ray.is_initialized():
        return
    # Keep Ray from starting a cluster of its own here, once this one is left: every call of Ray's does that where there
    # is none, and a handle of Serve's asks for its replicas' figures every few seconds in a thread (2.60).
    auto_init_hook.enable_auto_connect = False
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        with _own_handler_of_sigterm():
            ray.init(address=address, namespace="wan-tpu", **settings)
    except (ConnectionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ClusterNotFound(f"no Ray cluster answers at {address} ({reason}); is it up?") from None


@contextlib.contextmanager
def _own_handler_of_sigterm() -> Iterator[None]:
    """Put this process's handler of SIGTERM back in place of what Ray installs when it is initialised (2.60).

    Ray's C++ library prints its stack and, three seconds later, aborts a process that is still ending in good order.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def leave() -> None:
    """Leave the cluster that this process has joined, if any; another one can be joined then."""
    import ray

    ray.shutdown()
    if "ray.serve.context" in sys.modules:
        # Serve keeps its controller's handle, and believes it is of this cluster when the job has the same number
        # (2.60): the first job of every cluster has.
        sys.modules["ray.serve.context"]._disconnect()


def stay_on_loopback(address: str) -> None:
    """Let this process and its children join a cluster on the loopback interface, as an emulated one is."""
    if not is_loopback(address):
        return
    # Ray replaces a loopback address by the machine's own, where an emulated cluster doesn't listen, unless it is told
    # that clusters of several machines are not wanted. It has no other setting for it (2.60, services.py).
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    use_token()
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False  # in case Ray had been imported before


def _check_answers(address: str) -> None:
    """Fail at once where Ray would try for two minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ClusterNotFound(f"no Ray cluster answers at {address!r} ({error}); is it up? Give host:port") from None


def is_loopback(address: str) -> bool:
    """Whether "host:port" is of this machine alone."""
    host = address.rpartition(":")[0]
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
