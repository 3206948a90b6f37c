"""Bring a database to the schema of this program: make a new one, upgrade an older one."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from actors.jobs.database import Database
from actors.jobs.errors import StoreError
from actors.jobs.tables import Table

_FOLDER = Path(__file__).parent


def migrate(database: Database) -> None:
    """Make the tables, or run the migrations that are missing, all or none; several processes may call this at once.

    Raises `StoreError` when the schema is of a newer program.
    """
    config = Config()
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    known = ScriptDirectory.from_config(config)
    with database.write() as session:
        database.serialize(session)
        connection = session.connection()
        found = MigrationContext.configure(connection).get_current_revision()
        config.attributes["connection"] = connection
        if found is None:  # new: https://alembic.sqlalchemy.org/en/latest/cookbook.html, "up to date from scratch"
            Table.metadata.create_all(connection, checkfirst=False)
            command.stamp(config, "head")
        elif found in {script.revision for script in known.walk_revisions()}:
            command.upgrade(config, "head")
        else:
            raise StoreError(
                f"{database} has schema {found}, this program knows up to {known.get_current_head()}: "
                "use the version of wan-tpu that made it, or a newer one"
            )
