"""Create the tables of a new database, or upgrade an older one to this program's schema."""

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
    """Create the tables or run all missing migrations in one transaction. Several processes may call this at once.

    Raises:
        StoreError: The schema is that of a newer program.
    """
    config = Config()
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    known = ScriptDirectory.from_config(config)
    with database.write() as session:
        database.serialize(session)
        connection = session.connection()
        revision = MigrationContext.configure(connection).get_current_revision()
        config.attributes["connection"] = connection
        # A new database: https://alembic.sqlalchemy.org/en/latest/cookbook.html, "up to date from scratch".
        if revision is None:
            Table.metadata.create_all(connection, checkfirst=False)
            command.stamp(config, "head")
        elif revision in {script.revision for script in known.walk_revisions()}:
            command.upgrade(config, "head")
        else:
            raise StoreError(
                f"{database} has schema {revision}, but this program knows only up to {known.get_current_head()}; "
                "use the version of wan-tpu that created it, or a newer one"
            )
