"""Check-ins: what each process of a service writes every few seconds, so that any process can report for all.

A check-in says that the process is there, and has its metrics. Every function is one transaction.
"""

import dataclasses
import os
import secrets
import socket

from sqlalchemy import delete, select

from actors.jobs.database import Database
from actors.jobs.tables import CheckIn

FORGET_S = 86400.0  # A process that has been silent for this long loses its row.


def make_process_name(kind: str) -> str:
    """Return a name that no other process has."""
    return f"{kind}-{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(4)}"


def check_in(database: Database, process: CheckIn) -> None:
    """Replace a process's last check-in. Names are unique, so no other process writes the same row."""
    with database.write() as session:
        now = database.now(session)
        session.merge(dataclasses.replace(process, received_at=now))
        session.execute(delete(CheckIn).where(CheckIn.received_at < now - FORGET_S))


def list_check_ins(database: Database, within_s: float) -> list[CheckIn]:
    """Return the check-ins of the last `within_s` seconds, ordered by name."""
    with database.read() as session:
        since = database.now(session) - within_s
        return list(session.scalars(select(CheckIn).where(CheckIn.received_at >= since).order_by(CheckIn.name)))


def check_out(database: Database, name: str) -> None:
    """Remove the row of a process that is about to end."""
    with database.write() as session:
        session.execute(delete(CheckIn).where(CheckIn.name == name))
