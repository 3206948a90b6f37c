"""Heartbeats of a service's processes, with their metrics, so that any process can report for all.

Every function is one transaction.
"""

import dataclasses
import os
import secrets
import socket

from sqlalchemy import delete, select

from actors.jobs.database import Database
from actors.jobs.tables import Heartbeat

FORGET_S = 86400.0  # A process that has been silent for this long loses its row.


def process_name(kind: str) -> str:
    """Return a name that no other process has."""
    return f"{kind}-{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(4)}"


def send_heartbeat(database: Database, process: Heartbeat) -> None:
    """Replace a process's last heartbeat. Names are unique, so no other process writes the same row."""
    with database.write() as session:
        now = database.now(session)
        session.merge(dataclasses.replace(process, received_at=now))
        session.execute(delete(Heartbeat).where(Heartbeat.received_at < now - FORGET_S))


def read_heartbeats(database: Database, within_s: float) -> list[Heartbeat]:
    """Return the heartbeats of the last `within_s` seconds, ordered by name."""
    with database.read() as session:
        since = database.now(session) - within_s
        return list(session.scalars(select(Heartbeat).where(Heartbeat.received_at >= since).order_by(Heartbeat.name)))


def remove_heartbeat(database: Database, name: str) -> None:
    """Remove the row of a process that is about to end."""
    with database.write() as session:
        session.execute(delete(Heartbeat).where(Heartbeat.name == name))
