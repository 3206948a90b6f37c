"""The same cases run on SQLite and on a real PostgreSQL server."""

import shutil

import pytest
from sqlalchemy.engine import make_url

from actors.jobs.database import Database
from actors.jobs.store import JobStore, open_database
from actors.jobs.work import WorkQueue
from tests.actors.jobs import postgres


@pytest.fixture(scope="session")
def postgres_server():
    programs = postgres.binaries()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    pytest.importorskip("psycopg", reason='its driver is not installed (pip install ".[postgresql]")')
    with postgres.server(programs) as running:
        yield running


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_address(request, tmp_path):
    """Return the address of an empty database."""
    if request.param == "sqlite":
        return str(tmp_path / "empty.sqlite")
    return request.getfixturevalue("postgres_server").new_database()


@pytest.fixture(scope="session")
def migrated_postgres(postgres_server):
    """Return the name of an empty database with the schema. Copying it is faster than migrating each database."""
    address = postgres_server.new_database()
    open_database(address).close()
    return make_url(address).database


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory):
    file = tmp_path_factory.mktemp("migrated") / "jobs.sqlite"
    open_database(file).close()
    return file


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request, tmp_path):
    """Return the address of an empty database with the schema."""
    if request.param == "sqlite":
        yield str(shutil.copy(request.getfixturevalue("migrated_sqlite"), tmp_path / "jobs.sqlite"))
        return
    server = request.getfixturevalue("postgres_server")
    with server.shown():
        yield server.new_database(like=request.getfixturevalue("migrated_postgres"))


@pytest.fixture
def database(address):
    opened = Database(address)
    yield opened
    opened.close()


@pytest.fixture
def store(database):
    return JobStore(database)


@pytest.fixture
def work(database):
    return WorkQueue(database)
