"""What the processes of a service say of themselves, so that any of them can answer for all."""

import dataclasses

from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from actors.jobs.database import Database
from actors.jobs.tables import notices

FORGET_S = 86400.0  # a process that has said nothing for so long is of no interest to anybody


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notice:
    """The latest word of a process.

    kind   what it is: "ingress", "worker", ...
    age_s  seconds since it was told
    """

    name: str
    kind: str
    content: str
    age_s: float


class Notices:
    """The notices of a database. Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def tell(self, name: str, kind: str, content: str) -> None:
        """Put a notice in place of the one of that name, and remove what is long past."""
        with self._database.write() as connection:
            now = self._database.now(connection)
            values = {"kind": kind, "content": content, "told_at": now}
            if connection.execute(update(notices).where(notices.c.name == name).values(**values)).rowcount == 0:
                try:
                    with connection.begin_nested():
                        connection.execute(insert(notices).values(name=name, **values))
                except IntegrityError:  # told by another at the same moment
                    connection.execute(update(notices).where(notices.c.name == name).values(**values))
                connection.execute(delete(notices).where(notices.c.told_at < now - FORGET_S))

    def read(self, kind: str | None = None, *, within_s: float = FORGET_S) -> list[Notice]:
        """Return the notices of a kind (all when left out) that were told lately, by name."""
        with self._database.read() as connection:
            now = self._database.now(connection)
            query = select(notices).where(notices.c.told_at >= now - within_s).order_by(notices.c.name)
            if kind is not None:
                query = query.where(notices.c.kind == kind)
            return [
                Notice(name=row.name, kind=row.kind, content=row.content, age_s=max(0.0, now - row.told_at))
                for row in connection.execute(query)
            ]

    def remove(self, name: str) -> None:
        """Remove a notice: its process ends."""
        with self._database.write() as connection:
            connection.execute(delete(notices).where(notices.c.name == name))
