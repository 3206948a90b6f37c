"""A relay to PostgreSQL that breaks when a test wants it to: as a commit is sent, or as it is answered."""

import contextlib
import socket
import threading
from pathlib import Path
from typing import Literal

_NAME = ".s.PGSQL.5432"


class Relay:
    """Passes the bytes of a server's socket on, in a folder of its own.

    lose  what of the next commit but `after` gets lost: the request, or the answer of a commit that was made
    open  whether new connections get through
    """

    def __init__(self, server: Path, folder: Path) -> None:
        self._server = str(server / _NAME)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(folder / _NAME))
        self._listening.listen()
        self.lose: Literal["request", "answer"] | None = None
        self.after = 0
        self.open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections."""
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                if not self.open:
                    client.close()
                    continue
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                lost = threading.Event()
                threading.Thread(target=self._ask, args=(client, server, lost), daemon=True).start()
                threading.Thread(target=self._answer, args=(client, server, lost), daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket, lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while content := client.recv(65536):
                if b"COMMIT\0" in content and self.lose is not None:
                    self.after -= 1
                    if self.after < 0:
                        if self.lose == "request":
                            break
                        self.lose = None
                        lost.set()
                server.sendall(content)
        self.lose = None if self.lose == "request" and self.after < 0 else self.lose
        _shut(client, server)

    def _answer(self, client: socket.socket, server: socket.socket, lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while content := server.recv(65536):
                if lost.is_set():
                    break
                client.sendall(content)
        _shut(client, server)


def _shut(*sockets: socket.socket) -> None:
    for connection in sockets:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
