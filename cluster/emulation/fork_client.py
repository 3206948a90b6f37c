"""What a raylet starts in place of Python where there is a fork server: it has itself forked there, and ends with that.

Run as `python -IS fork_client.py SOCKET ...`, where `...` would follow `python`. It imports next to nothing.
"""

import contextlib
import json
import os
import signal
import socket
import sys

STREAMS = (0, 1, 2)


def main(server: str, arguments: list[str]) -> None:
    """Have `python *arguments` forked by the server that listens at that path; without one, become it."""
    start = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "nice": os.nice(0),
        "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        with contextlib.suppress(OSError):  # the server is gone
            connection.connect(server)
            socket.send_fds(connection, [b"\0"], STREAMS)
            connection.sendall(json.dumps(start).encode())
            connection.shutdown(socket.SHUT_WR)
            if connection.recv(1):  # the fork has begun
                connection.recv(1)  # and has ended: it never sends a second one
                return
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
