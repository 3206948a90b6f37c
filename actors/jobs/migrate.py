"""Bring a database to the schema of this program, from any earlier one."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from actors.jobs.database import Database
from actors.jobs.errors import StoreError

_FOLDER = Path(__file__).parent / "migrations"


def migrate(database: Database, version: str | None = None) -> None:
    """Run the steps that are missing, all or none of them; several processes may call this at once.

    version  stop at this one ("0001"); the newest when left out

    Raises `StoreError` when the schema is of a newer program.
    """
    config = Config()
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    known = ScriptDirectory.from_config(config)
    with database.write() as connection:
        database.in_turn(connection)
        found = MigrationContext.configure(connection).get_current_revision()
        if found is not None and found not in {script.revision for script in known.walk_revisions()}:
            raise StoreError(
                f"{database} has schema {found}, this program knows up to {known.get_current_head()}: "
                "use the version of wan-tpu that made it, or a newer one"
            )
        config.attributes["connection"] = connection
        command.upgrade(config, version or "head")
