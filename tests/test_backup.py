"""A service goes on from a backup of its database and storage, made while it ran (docs/troubleshooting.md)."""

import dataclasses
import shutil
import subprocess

import pytest

from actors.api.settings import ServiceSettings
from actors.jobs.keys import make_key
from actors.jobs.store import open_database
from actors.reliability import ReliabilitySettings
from tests.actors.api.serving import MODEL, Engine, create, open_client, serve, wait_for_end, working
from tests.actors.jobs import postgres
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def server():
    programs = postgres.binaries()
    if programs is None or not (programs / "pg_dump").exists():
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    pytest.importorskip("psycopg", reason='its driver is not installed (pip install ".[postgresql]")')
    with postgres.server(programs) as running:
        yield running


class OnPostgres:
    """Backs a service's database up, and restores it into another one."""

    def __init__(self, server, folder):
        self._server, self._dump, self._programs = server, folder / "jobs.dump", postgres.binaries()
        self.database = server.new_database()

    def back_up(self):
        self._run("pg_dump", "--format=custom", f"--file={self._dump}", self.database)

    def restore(self):
        database = self._server.new_database()
        self._run("pg_restore", "--no-owner", "--exit-on-error", f"--dbname={database}", self._dump)
        return database

    def _run(self, program, *arguments):
        subprocess.run([self._programs / program, *arguments], check=True, capture_output=True)


class OnSqlite:
    """The same for a file."""

    def __init__(self, folder):
        self._dump = folder / "copy.sqlite"
        self.database, self._restored = str(folder / "jobs.sqlite"), str(folder / "restored.sqlite")

    def back_up(self):
        subprocess.run(["sqlite3", self.database, f".backup {self._dump}"], check=True, capture_output=True)

    def restore(self):
        shutil.copy(self._dump, self._restored)
        return self._restored


@pytest.fixture(params=[pytest.param("postgresql", marks=pytest.mark.thorough), "sqlite"])
def backup(request, tmp_path):
    if request.param == "postgresql":
        return OnPostgres(request.getfixturevalue("server"), tmp_path)
    if shutil.which("sqlite3") is None:
        pytest.skip("there is no sqlite3 (Debian: apt-get install sqlite3)")
    return OnSqlite(tmp_path)


def test_service_goes_on_from_a_backup_that_was_made_while_it_ran(backup, tmp_path):
    quick = ReliabilitySettings(check_in_s=0.3, lease_s=3, queue_check_s=0.3)
    chips = {"denoise_high": 4, "denoise_low": 8}
    settings = ServiceSettings(
        database=backup.database, storage=str(tmp_path / "results"), model=MODEL, chips=chips, reliability=quick
    )
    engines = [Engine(tmp_path / name) for name in ("before", "after")]
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    opened = open_database(settings.database)
    headers = {"Authorization": f"Bearer {make_key(opened, 'ann')}"}
    opened.close()

    with serve(settings) as address, open_client(address, headers=headers) as http, working(settings, engines[0]):
        finished = wait_for_end(http, create(http).json()["id"])
        content = http.get(f"/v1/videos/{finished['id']}/content").content
        engines[0].go.clear()
        running = create(http, prompt="a dog").json()["id"]
        wait_for(lambda: http.get(f"/v1/videos/{running}").json()["status"] == "in_progress")
        backup.back_up()
        shutil.copytree(settings.storage, tmp_path / "copy")

    settings = dataclasses.replace(settings, database=backup.restore(), storage=str(tmp_path / "copy"))
    with serve(settings) as address, open_client(address, headers=headers) as http, working(settings, engines[1]):
        assert http.get(f"/v1/videos/{finished['id']}").json() == finished
        assert http.get(f"/v1/videos/{finished['id']}/content").content == content
        assert wait_for_end(http, running)["status"] == "completed"
        assert wait_for_end(http, create(http, prompt="a bird").json()["id"])["status"] == "completed"
        assert [request.prompt for request in engines[1].requests] == ["a dog", "a bird"]
