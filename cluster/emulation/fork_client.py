"""Started by raylets in place of Python: asks the fork server for a worker, and ends when the worker ends.

It is run as `python -IS fork_client.py SOCKET ...`, where `...` is what would follow `python`, and imports almost
nothing.
"""

import contextlib
import json
import os
import signal
import socket
import sys

STREAMS = (0, 1, 2)


def main(server: str, arguments: list[str]) -> None:
    """Let the server at a path fork `python *arguments`; if there is no server, execute that instead."""
    start = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "nice": os.nice(0),
        "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        with contextlib.suppress(OSError):  # The server may be gone.
            connection.connect(server)
            socket.send_fds(connection, [b"\0"], STREAMS)
            connection.sendall(json.dumps(start).encode())
            connection.shutdown(socket.SHUT_WR)
            if connection.recv(1):  # The fork has begun.
                connection.recv(1)  # It sends nothing more, so this returns when it has ended.
                return
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
