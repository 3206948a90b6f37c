"""Check whether a port can be listened on, and find the process that holds it where it can't."""

import errno
import shlex
import socket
from collections.abc import Iterable

import psutil

from cluster.errors import PortTaken

_TRIED = 200  # How many ports after a taken one are tried, to suggest a free one.
_LAST = 65535
_LONGEST = 80  # How many characters of another process's command line a message shows.


def check_port(host: str, port: int) -> None:
    """Check that this machine can listen on a port.

    HAProxy wouldn't notice: it silently shares a port with another HAProxy of the same user, and each gets half of the
    requests.

    Raises:
        PortTaken: The port is taken; the message names the process that listens there, and a free port.
    """
    problem = _try_port(host, port)
    if problem is None:
        return
    if problem.errno not in (errno.EADDRINUSE, errno.EACCES):
        raise PortTaken(
            f"this machine can't listen at {host} port {port} ({problem.strerror or problem}); set --host to an "
            "address of this machine, such as 127.0.0.1"
        )
    trouble = f"is taken{_describe_holder(host, port)}; end that process"
    if problem.errno == errno.EACCES:
        trouble = "is reserved for root; run this as root"
    free_ports = (
        other for other in range(max(port + 1, 1024), min(port + _TRIED, _LAST)) if _try_port(host, other) is None
    )
    free = next(free_ports, None)
    alternative = "choose another --port" if free is None else f"choose one that is free: --port {free}"
    raise PortTaken(f"port {port} of {host} {trouble}, or {alternative}")


def _try_port(host: str, port: int) -> OSError | None:
    """Try to bind a port; return the error, None where there is none."""
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as probe:
            # Like HAProxy, ignore connections that have ended; only a process that listens is in the way.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None


def _describe_holder(host: str, port: int) -> str:
    """Return " by process ..." for the process that listens on a port; "" where this user may not see it."""
    everywhere = ("0.0.0.0", "::")
    address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    for connection in _list_listening():
        if (
            connection.pid
            and connection.laddr.port == port
            and (address in everywhere or connection.laddr.ip in (address, *everywhere))
        ):
            try:
                command = shlex.join(psutil.Process(connection.pid).cmdline())
            except psutil.Error:
                continue
            short = command if len(command) <= _LONGEST else f"{command[:_LONGEST]}..."
            return f" by process {connection.pid} ({short})"
    return ""


def _list_listening() -> Iterable["psutil._common.sconn"]:
    try:
        return [connection for connection in psutil.net_connections("tcp") if connection.status == psutil.CONN_LISTEN]
    except (psutil.Error, OSError):
        return []
