"""The connection to SQLite or PostgreSQL: transactions that behave the same on both."""

import contextlib
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

LOCK_WAIT_S = 30  # of a writer for another one; each holds the lock for milliseconds
# PostgreSQL's codes (https://www.postgresql.org/docs/current/errcodes-appendix.html).
_READ_ONLY, _IDLE_TOO_LONG = "25006", "25P03"  # a standby, as after a failover; a transaction that stood still
# What bounds how long a process that froze, or whose node lost its power, keeps its locks: transactions here take
# milliseconds. Settings of the address (?options=...) come after these, and win.
_LIMITS = {
    "lock_timeout": "15s",
    "statement_timeout": "30s",
    "idle_in_transaction_session_timeout": "10s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "20s",
}
_LOCK = 0x77616E747075  # "wantpu": the key of PostgreSQL's advisory lock, one for our database


class Database:
    """An address, and the transactions at it. Safe between threads; each process makes its own (it can be pickled)."""

    def __init__(self, address: str | Path) -> None:
        """Name a database: the path of a SQLite file, or postgresql://user:password@host/name.

        Raises `StoreError` for an address that can't be understood. Nothing is connected yet.
        """
        self._address = str(address)
        url = _url(self._address)
        self.postgresql = url.get_backend_name() == "postgresql"
        self._writer = threading.Lock()
        self._engine = _postgresql(url) if self.postgresql else _sqlite(url)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Database, (self._address,)

    def __str__(self) -> str:
        """Return the address without its password, which may also stand among its parameters."""
        url = self._engine.url
        shown = {name: "***" if "password" in name.lower() else value for name, value in url.query.items()}
        return url.set(query=shown).render_as_string(hide_password=True)

    def read(self) -> AbstractContextManager[Session]:
        """Give a session for reading, at one moment of the database."""
        return self._session(writes=False)

    @contextlib.contextmanager
    def write(self) -> Iterator[Session]:
        """Give a session whose changes appear all at once, or not at all when the block raises.

        On SQLite writers follow one another; on PostgreSQL they lock the rows that they touch.
        """
        with self._one_writer(), self._session(writes=True) as session:
            yield session

    def serialize(self, session: Session) -> None:
        """Let one such transaction run at a time, by a lock until its end. SQLite's writers always do."""
        if self.postgresql:
            session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})

    def now(self, session: Session) -> float:
        """Return Unix seconds by the one clock of all processes: the server's (SQLite has one machine anyway)."""
        if self.postgresql:
            return float(session.scalars(text("SELECT extract(epoch FROM clock_timestamp())")).one())
        return time.time()

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextlib.contextmanager
    def _one_writer(self) -> Iterator[None]:
        """Let one thread write at a time: SQLite's own waiting is a sleep of up to 0.1 s, again and again."""
        if self.postgresql:
            yield
            return
        if not self._writer.acquire(timeout=LOCK_WAIT_S):
            raise StoreUnavailable(f"{self} is being written to by another thread for {LOCK_WAIT_S} s; try again")
        try:
            yield
        finally:
            self._writer.release()

    @contextlib.contextmanager
    def _session(self, *, writes: bool) -> Iterator[Session]:
        """Give a session with a transaction; what it has read stays readable afterwards."""
        committing = False
        try:
            with Session(self._engine, expire_on_commit=False) as session, session.begin():
                session.connection(execution_options={"writes": writes})
                yield session
                committing = writes
        except PoolTimeoutError:
            raise StoreUnavailable(f"all connections to {self} have been in use for a while; try again") from None
        except DBAPIError as error:
            raise self._explained(error, CommitUncertain if committing else StoreUnavailable) from None

    def _explained(self, error: DBAPIError, unavailable: type[StoreUnavailable]) -> WanTpuError:
        """Return what is raised for a driver's error. It quotes no values, which may be a client's prompt."""
        state = getattr(error.orig, "sqlstate", None)
        if state == _READ_ONLY:
            self._engine.dispose()  # the address may lead to the new primary by now
            return StoreUnavailable(f"{self} takes no changes now: {_reason(error)}; try again")
        if error.connection_invalidated or state == _IDLE_TOO_LONG:
            return unavailable(f"the connection to {self} was lost: {_reason(error)}; try again")
        if isinstance(error, OperationalError):
            return unavailable(f"{self} can't be used now: {_reason(error)}; try again")
        kind, statement = type(error.orig).__name__, " ".join(str(error.statement).split())
        return StoreFailed(f"{self} refused a statement ({kind}{'' if state is None else f' {state}'}): {statement}")


def _url(address: str) -> URL:
    if "://" not in address:
        if not address:
            raise StoreError("the database's address is empty; give the path of a file, or postgresql://...")
        path = Path(address).expanduser().absolute()
        return URL.create("sqlite", database=str(path))
    try:
        url = make_url(address)
        backend = url.get_backend_name()
    except (ArgumentError, NoSuchModuleError, ValueError):
        raise StoreError(_allowed("that address")) from None  # it isn't shown: it may hold a password
    if backend == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    if backend == "sqlite" and url.database:
        return url
    raise StoreError(_allowed(f"{backend}://"))


def _allowed(given: str) -> str:
    return f"{given} is no database for jobs; give the path of a SQLite file, or postgresql://user@host/name"


def _postgresql(url: URL) -> Engine:
    given = url.query.get("options", ())
    limits = " ".join(f"-c {name}={value}" for name, value in _LIMITS.items())
    options = " ".join([limits, given] if isinstance(given, str) else [limits, *given])
    try:
        return sqlalchemy.create_engine(
            url,
            hide_parameters=True,  # they hold prompts
            pool_pre_ping=True,  # a connection that died while it was idle is replaced
            pool_size=5,
            max_overflow=15,
            # A server that is silently gone is noticed after seconds, not after Linux's quarter of an hour.
            connect_args={
                "connect_timeout": 10,
                "tcp_user_timeout": 10_000,
                "keepalives_idle": 10,
                "keepalives_interval": 5,
                "keepalives_count": 3,
                "application_name": "wan-tpu",
                "options": options,
            },
        )
    except ModuleNotFoundError:
        raise StoreError('PostgreSQL needs its driver: pip install "wan-tpu[postgresql]"') from None


def _sqlite(url: URL) -> Engine:
    assert url.database is not None
    file = Path(url.database)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreError(f"the folder of {file} can't be made ({error.strerror}); give another path") from None
    with contextlib.suppress(OSError):  # SQLite says what is wrong; beside it the same mode is used
        file.touch(mode=0o600)
    engine = sqlalchemy.create_engine(
        url, hide_parameters=True, connect_args={"timeout": LOCK_WAIT_S, "check_same_thread": False}
    )

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions begin below, not where the driver guesses
        connection.execute("PRAGMA journal_mode = WAL")  # readers don't wait for a writer
        connection.execute("PRAGMA synchronous = FULL")  # what was accepted survives a power cut

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        # A write lock from the start: a reader that turns writer would fail when another has written in between.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options()["writes"] else "BEGIN")

    return engine


def _reason(error: DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0] if str(error.orig).strip() else type(error.orig).__name__
