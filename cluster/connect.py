"""Join a Ray cluster as a driver."""

import contextlib
import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from cluster import ray_private
from cluster.authentication import use_token
from cluster.errors import ClusterNotFound


def connect(address: str) -> None:
    """Join the Ray cluster whose GCS listens on `address`, unless this process has joined one already.

    Args:
        address: "host:port".

    Raises:
        ClusterNotFound: Nothing answers there.
    """
    stay_on_loopback(address)
    # Ray reads its settings when it is imported, so the line above must come first.
    import ray

    _check_answers(address)
    if ray.is_initialized():
        return
    ray_private.forbid_clusters_of_its_own()
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        with _own_handler_of_sigterm():
            ray.init(address=address, namespace="wan-tpu", **settings)
    except (ConnectionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ClusterNotFound(f"no Ray cluster answers at {address} ({reason}); is it up?") from None


@contextlib.contextmanager
def _own_handler_of_sigterm() -> Iterator[None]:
    """Restore this process's SIGTERM handler, which Ray 2.60 replaces when it is initialised.

    With Ray's handler, its C++ library prints the stack and, three seconds later, aborts a process that is still
    shutting down in good order.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def leave() -> None:
    """Leave the cluster that this process has joined, if any, so that it can join another."""
    import ray

    ray.shutdown()
    ray_private.forget_serve()


def stay_on_loopback(address: str) -> None:
    """Let this process and its children join a cluster on the loopback interface, where emulated ones listen."""
    if not is_loopback(address):
        return
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = (
        "0"  # For children, and for this process if Ray isn't imported yet.
    )
    use_token()
    ray_private.keep_loopback_addresses()


def _check_answers(address: str) -> None:
    """Raise `ClusterNotFound` at once where nothing listens; Ray would try for two minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ClusterNotFound(
            f"no Ray cluster answers at {address!r} ({error}); give host:port of its GCS, and "
            "check that the cluster is up"
        ) from None


def is_loopback(address: str) -> bool:
    """Return whether "host:port" can be reached from this machine only."""
    host = address.rpartition(":")[0]
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
