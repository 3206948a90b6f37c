"""Settings with which each emulated cluster has its own HAProxy, which Ray Serve puts in front of a service."""

import random
import shlex
import socket
import sys
from pathlib import Path

import cluster.provision.haproxy

DRAIN_S = 2  # How long an ingress that ends still answers, until HAProxy knows; one machine needs no more.
_PORTS = range(20000, 32000, 100)  # Below the ports that the kernel assigns (from 32768).


def environment(folder: Path) -> dict[str, str]:
    """Return Serve's settings for a head node with its files in a folder; HAProxy runs only on Linux."""
    if sys.platform != "linux":
        return {}
    # The path is short because Serve adds the node's id, and paths of sockets may have only 97 characters.
    haproxy_folder = folder / "haproxy"
    haproxy_folder.mkdir(mode=0o700)
    start = haproxy_folder / "start"
    start.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", cluster.provision.haproxy.__file__])} "$@"\n')
    start.chmod(0o700)
    port = _find_free_ports()
    return cluster.provision.haproxy.ENVIRONMENT | {
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(start),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy_folder / "config"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy_folder / "admin"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy_folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy_folder / "state"),
        "RAY_SERVE_HAPROXY_NBTHREAD": "2",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(port),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(port + 1),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(port + 99),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DRAIN_S),
    }


def _find_free_ports() -> int:
    """Return the first of a hundred ports. Only the first is known to be free; Serve tries the others itself."""
    for first in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", first))
            except OSError:
                continue
            return first
    raise OSError(f"no port from {_PORTS.start} to {_PORTS.stop} is free")
