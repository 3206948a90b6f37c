"""A private, real PostgreSQL server for the tests, on a Unix socket in a temporary folder, and poolers before it."""

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

START_S = 60


def binaries() -> Path | None:
    """Return the folder of PostgreSQL's programs: of the path, or the newest of Debian's."""
    executable = shutil.which("initdb")
    if executable:
        return Path(executable).resolve().parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return installed[-1].parent if installed else None


def find_unprivileged_user() -> str | None:
    """Return who runs the server: PostgreSQL refuses to be root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in names)


class Server:
    """A running server and its databases."""

    def __init__(self, folder: Path, user: str) -> None:
        self._folder, self._user = folder, user
        self._numbers = itertools.count()

    def new_database(self, like: str = "template1") -> str:
        """Return the address of a new database, empty or a copy of the one named `like`."""
        import psycopg

        name = f"jobs_{next(self._numbers)}"
        with psycopg.connect(self._at("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {like}".encode())
        return self._at(name)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Print what the server logs during a test; pytest shows it if the test fails."""
        with (self._folder / "log").open() as log:
            log.seek(0, os.SEEK_END)
            yield
            print(log.read())

    @contextlib.contextmanager
    def pooler(self, mode: str) -> Iterator[Callable[[str], str]]:
        """Run PgBouncer with its defaults and a mode; yield what turns an address of this server into the pooler's."""
        program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
        assert program is not None
        folder = Path(tempfile.mkdtemp(prefix="wan-tpu-pgbouncer-"))
        shutil.chown(folder, self._user)
        (folder / "pgbouncer.ini").write_text(
            f"[databases]\n* = host={self._folder} user={self._user}\n[pgbouncer]\nunix_socket_dir = {folder}\n"
            f"listen_port = 5432\nauth_type = any\npool_mode = {mode}\n"
        )
        shutil.chown(folder / "pgbouncer.ini", self._user)  # Whatever the umask is.
        user = find_unprivileged_user()
        with (folder / "log").open("wb") as log:
            started = subprocess.Popen([program, folder / "pgbouncer.ini"], user=user, cwd=folder, stderr=log)
        try:
            give_up = time.monotonic() + START_S
            while not (folder / ".s.PGSQL.5432").exists():
                if started.poll() is not None or time.monotonic() > give_up:
                    raise RuntimeError(f"PgBouncer did not start: {(folder / 'log').read_text()}")
                time.sleep(0.05)
            yield lambda address: address.replace(str(self._folder), str(folder))
        finally:
            started.send_signal(signal.SIGTERM)
            started.wait(START_S)
            shutil.rmtree(folder, ignore_errors=True)

    def _at(self, name: str) -> str:
        return f"postgresql://{self._user}@/{name}?host={self._folder}"


@contextlib.contextmanager
def server(programs: Path) -> Iterator[Server]:
    """Run a server until the block ends."""
    user = find_unprivileged_user()
    folder = Path(tempfile.mkdtemp(prefix="wan-tpu-postgres-"))
    if user is not None:
        shutil.chown(folder, user)
    data = str(folder / "data")
    name = user or pwd.getpwuid(os.geteuid()).pw_name
    started: subprocess.Popen[bytes] | None = None
    try:
        subprocess.run(
            [programs / "initdb", "-D", data, "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"],
            user=user,
            cwd=folder,
            check=True,
            capture_output=True,
            timeout=START_S,
        )
        log = open(folder / "log", "wb")  # noqa: SIM115 (closed below)
        with log:
            started = subprocess.Popen(
                [programs / "postgres", "-D", data, "-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off"],
                user=user,
                cwd=folder,
                stdout=log,
                stderr=log,
            )
        server = Server(folder, name)
        _wait(server, started, folder / "log")
        yield server
    finally:
        if started is not None:
            started.send_signal(signal.SIGQUIT)  # At once; nothing is kept.
            started.wait(START_S)
        shutil.rmtree(folder, ignore_errors=True)


def _wait(server: Server, started: "subprocess.Popen[bytes]", log: Path) -> None:
    import psycopg

    give_up = time.monotonic() + START_S
    while True:
        try:
            psycopg.connect(server._at("postgres")).close()
        except psycopg.OperationalError as error:
            if started.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"PostgreSQL did not start: {log.read_text()}") from error
            time.sleep(0.1)
        else:
            return
