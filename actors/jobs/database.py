"""The connection to SQLite or PostgreSQL: transactions that behave the same on both."""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from actors.jobs.errors import CommitUncertain, StoreError, StoreFailed, StoreUnavailable
from wan_tpu.errors import WanTpuError

LOCK_WAIT_S = 30  # How long a writer waits for another; each holds the lock for milliseconds.
# PostgreSQL's error codes (https://www.postgresql.org/docs/current/errcodes-appendix.html): the server is a standby, as
# after a failover; a transaction stood still for too long.
_READ_ONLY, _IDLE_TOO_LONG = "25006", "25P03"
# These bound how long a process that froze, or whose node lost power, keeps its locks. Transactions here take
# milliseconds. Settings in the address (?options=...) take precedence. Every transaction sets them for itself, since
# behind a pooler the server's connection serves others before and after it, and poolers refuse settings at the start of
# a connection.
_TRANSACTION_LIMITS = {"lock_timeout": "15s", "statement_timeout": "30s", "idle_in_transaction_session_timeout": "10s"}
# With these the server soon forgets clients whose nodes lost power. They concern its own connection, whoever uses it.
_KEEPALIVES = {"tcp_keepalives_idle": 10, "tcp_keepalives_interval": 5, "tcp_keepalives_count": 3}
# Words in the refusals of PgBouncer, and of services built on it, that stay until somebody changes something; their
# error code is the same (08P01) as for a pool that is only full.
_POOLER_REMEDIES = {
    "unsupported startup parameter": "a pooler takes no settings when a connection starts: remove `options` from the "
    "address and PGOPTIONS from the environment, or have the pooler ignore them (ignore_startup_parameters)",
    "statement pooling": "jobs need transactions: use transaction pooling (pool_mode = transaction) or session pooling",
}
_ADVISORY_LOCK = 0x77616E747075  # Spells "wantpu". PostgreSQL's advisory lock for the whole database has this key.


class Database:
    """A database and its transactions. Safe to share between threads; each process unpickles a copy of its own."""

    def __init__(self, address: str | Path) -> None:
        """Parse the address, without connecting yet.

        Args:
            address: The path of a SQLite file, or postgresql://user:password@host/name.

        Raises:
            StoreError: The address can't be parsed, or its driver is missing.
        """
        self._address = str(address)
        url = _parse_address(self._address)
        self.postgresql = url.get_backend_name() == "postgresql"
        self._writer = threading.Lock()
        self._engine = _make_postgresql_engine(url) if self.postgresql else _make_sqlite_engine(url)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Database, (self._address,)

    def __str__(self) -> str:
        """Return the address without its password, which may also be among its parameters."""
        url = self._engine.url
        options = {name: "***" if "password" in name.lower() else value for name, value in url.query.items()}
        return url.set(query=options).render_as_string(hide_password=True)

    def read(self) -> AbstractContextManager[Session]:
        """Open a session that reads one consistent snapshot of the database."""
        return self._open_session(writes=False)

    @contextlib.contextmanager
    def write(self) -> Iterator[Session]:
        """Open a session whose changes are committed together, or not at all if the block raises.

        SQLite runs one writer at a time; on PostgreSQL writers lock the rows that they touch.
        """
        with self._lock_writer(), self._open_session(writes=True) as session:
            yield session

    def serialize(self, session: Session) -> None:
        """Lock until the transaction ends, so that one such transaction runs at a time. SQLite's writers always do."""
        if self.postgresql:
            session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})

    def now(self, session: Session) -> float:
        """Return Unix seconds by the clock that all processes share: the server's, or this machine's with SQLite."""
        if self.postgresql:
            return float(session.scalars(text("SELECT extract(epoch FROM clock_timestamp())")).one())
        return time.time()

    def close(self) -> None:
        self._engine.dispose()

    @contextlib.contextmanager
    def _lock_writer(self) -> Iterator[None]:
        """Let one thread write at a time, since SQLite itself waits by polling, with sleeps of up to 0.1 s."""
        if self.postgresql:
            yield
            return
        if not self._writer.acquire(timeout=LOCK_WAIT_S):
            raise StoreUnavailable(f"{self} has been locked by another thread for {LOCK_WAIT_S} s; try again")
        try:
            yield
        finally:
            self._writer.release()

    @contextlib.contextmanager
    def _open_session(self, *, writes: bool) -> Iterator[Session]:
        """Open a session with a transaction. Rows that it has read stay readable afterwards."""
        committing = False
        try:
            with Session(self._engine, expire_on_commit=False) as session, session.begin():
                session.connection(execution_options={"writes": writes})
                yield session
                committing = writes
        except PoolTimeoutError:
            raise StoreUnavailable(f"all connections to {self} have been in use for a while; try again") from None
        except DBAPIError as error:
            raise self._translate_error(error, CommitUncertain if committing else StoreUnavailable) from None

    def _translate_error(self, error: DBAPIError, unavailable: type[StoreUnavailable]) -> WanTpuError:
        """Return our exception for a driver's error. It quotes no values, which may be a client's prompt."""
        state = getattr(error.orig, "sqlstate", None)
        for words, remedy in _POOLER_REMEDIES.items():
            if isinstance(error, OperationalError) and words in str(error.orig):
                return StoreError(f"{self} refuses this program ({_take_first_line(error)}): {remedy}")
        if state == _READ_ONLY:
            self._engine.dispose()  # By now the address may lead to the new primary.
            return StoreUnavailable(f"{self} accepts no changes now: {_take_first_line(error)}; try again")
        if error.connection_invalidated or state == _IDLE_TOO_LONG:
            return unavailable(f"the connection to {self} was lost: {_take_first_line(error)}; try again")
        if getattr(error.orig, "pgconn", None) is not None:  # No connection came about, perhaps never will.
            return StoreUnavailable(f"there is no connection to {self}: {' '.join(str(error.orig).split())}")
        if isinstance(error, OperationalError):
            return unavailable(f"{self} can't be used now: {_take_first_line(error)}; try again")
        kind, statement = type(error.orig).__name__, " ".join(str(error.statement).split())
        return StoreFailed(f"{self} refused a statement ({kind}{'' if state is None else f' {state}'}): {statement}")


def _parse_address(address: str) -> URL:
    if "://" not in address:
        if not address:
            raise StoreError("the database's address is empty; give the path of a file, or postgresql://...")
        path = Path(address).expanduser().absolute()
        return URL.create("sqlite", database=str(path))
    try:
        url = make_url(address)
        backend = url.get_backend_name()
    except (ArgumentError, NoSuchModuleError, ValueError):
        raise StoreError(_describe_allowed("that address")) from None  # Not quoted: it may hold a password.
    if backend == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    if backend == "sqlite" and url.database:
        return url
    raise StoreError(_describe_allowed(f"{backend}://"))


def _describe_allowed(scheme: str) -> str:
    return (
        f"{scheme} isn't supported as a database for jobs; give the path of a SQLite file, or "
        "postgresql://user@host/name"
    )


def _make_postgresql_engine(url: URL) -> Engine:
    own_options = str(url.query.get("options", ""))
    limits = [f"SET LOCAL {name} = '{value}'" for name, value in _TRANSACTION_LIMITS.items() if name not in own_options]
    keepalives = [f"SET {name} = {value}" for name, value in _KEEPALIVES.items() if name not in own_options]
    try:
        engine = sqlalchemy.create_engine(
            url,
            hide_parameters=True,  # They hold prompts.
            use_native_hstore=False,  # Nothing is looked up that no table has.
            pool_pre_ping=True,  # Replaces a connection that died while it was idle.
            pool_size=5,
            max_overflow=15,
            # Notice a server that disappeared silently within seconds, not after Linux's quarter of an hour.
            connect_args={
                "connect_timeout": 10,
                "tcp_user_timeout": 10_000,
                "keepalives_idle": 10,
                "keepalives_interval": 5,
                "keepalives_count": 3,
                "application_name": "wan-tpu",
                "autocommit": True,  # Transactions begin below.
                "prepare_threshold": None,  # A pooler's next transaction may go to a server that has prepared nothing.
            },
        )
    except ModuleNotFoundError:
        raise StoreError('PostgreSQL needs its driver: pip install ".[postgresql]"') from None

    @event.listens_for(engine, "connect")
    def configure_connection(connection: Any, _record: Any) -> None:
        connection.execute("; ".join(keepalives))

    @event.listens_for(engine, "begin")
    def begin_transaction(connection: Connection) -> None:
        writes = connection.get_execution_options()["writes"]
        begin = f"BEGIN ISOLATION LEVEL {'READ COMMITTED' if writes else 'REPEATABLE READ, READ ONLY'}"
        connection.exec_driver_sql("; ".join([begin, *limits]))  # One message, as long on its way as BEGIN alone.

    return engine


def _make_sqlite_engine(url: URL) -> Engine:
    assert url.database is not None
    file = Path(url.database)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreError(f"the folder of {file} can't be created ({error.strerror}); give another path") from None
    # SQLite gives its own files beside this one the same mode, and reports what is wrong with the path.
    with contextlib.suppress(OSError):
        file.touch(mode=0o600)
    engine = sqlalchemy.create_engine(
        url, hide_parameters=True, connect_args={"timeout": LOCK_WAIT_S, "check_same_thread": False}
    )

    @event.listens_for(engine, "connect")
    def configure_connection(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # Transactions begin below, not where the driver guesses.
        _use_wal(connection)
        connection.execute("PRAGMA synchronous = FULL")  # Accepted jobs survive a power cut.

    @event.listens_for(engine, "begin")
    def begin_transaction(connection: Connection) -> None:
        # Take the write lock from the start: upgrading a read lock fails if another writer has committed in between.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options()["writes"] else "BEGIN")

    return engine


def _use_wal(connection: sqlite3.Connection) -> None:
    """Let readers not wait for a writer. SQLite itself doesn't wait here for another process that writes a new file."""
    give_up = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
        time.sleep(0.02)


def _take_first_line(error: DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0] if str(error.orig).strip() else type(error.orig).__name__
