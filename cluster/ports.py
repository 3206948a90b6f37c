"""Whether a port can be listened on, and who has it where it can't."""

import errno
import shlex
import socket
from collections.abc import Iterable

import psutil

from cluster.errors import PortTaken

_TRIED = 200  # Ports after one that is taken, among which a free one is looked for.
_LAST = 65535
_LONGEST = 80  # Characters of another process's command line in a message.


def check_port(host: str, port: int) -> None:
    """Raise `PortTaken` unless this machine can listen there; the message names who does, and a port that is free.

    HAProxy shares a port with another HAProxy of the same user without a word, and each gets half of the requests: so
    it isn't left to find out.
    """
    problem = _problem(host, port)
    if problem is None:
        return
    if problem.errno not in (errno.EADDRINUSE, errno.EACCES):
        raise PortTaken(
            f"this machine can't listen at {host} port {port} ({problem.strerror or problem}); give --host an address "
            "of it, such as 127.0.0.1"
        )
    taken = f"is taken{_by_whom(host, port)}; end that"
    if problem.errno == errno.EACCES:
        taken = "is for root alone; run this as root"
    others = (other for other in range(max(port + 1, 1024), min(port + _TRIED, _LAST)) if _problem(host, other) is None)
    free = next(others, None)
    alternative = "choose another --port" if free is None else f"choose one that is free: --port {free}"
    raise PortTaken(f"port {port} of {host} {taken}, or {alternative}")


def _problem(host: str, port: int) -> OSError | None:
    """Return why this machine can't listen there, None where it can."""
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as tried:
            # Connections that have ended don't keep HAProxy from a port; whoever listens does.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        return error
    return None


def _by_whom(host: str, port: int) -> str:
    """Return " by ..." for the process that listens on a port, nothing where this user may not know."""
    everywhere = ("0.0.0.0", "::")
    address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    for connection in _listening():
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


def _listening() -> Iterable["psutil._common.sconn"]:
    try:
        return [connection for connection in psutil.net_connections("tcp") if connection.status == psutil.CONN_LISTEN]
    except (psutil.Error, OSError):
        return []
