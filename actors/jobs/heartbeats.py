"""Heartbeats of the processes of a service with their metrics, so that any of them can answer for all.

Every function is one transaction.
"""

import dataclasses
import os
import secrets
import socket

from sqlalchemy import delete, select

from actors.jobs.database import Database
from actors.jobs.tables import Heartbeat

FORGET_S = 86400.0  # after which the row of a process that sends no more is deleted


def process_name(kind: str) -> str:
    """Return a name that no other process has."""
    return f"{kind}-{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(4)}"


def send_heartbeat(database: Database, process: Heartbeat) -> None:
    """Record a heartbeat in place of the process's last one. A process's name is its own: nobody else writes it."""
    with database.write() as session:
        now = database.now(session)
        session.merge(dataclasses.replace(process, received_at=now))
        session.execute(delete(Heartbeat).where(Heartbeat.received_at < now - FORGET_S))


def read_heartbeats(database: Database, within_s: float) -> list[Heartbeat]:
    """Return the heartbeats of the last seconds, by name."""
    with database.read() as session:
        since = database.now(session) - within_s
        return list(session.scalars(select(Heartbeat).where(Heartbeat.received_at >= since).order_by(Heartbeat.name)))


def remove_heartbeat(database: Database, name: str) -> None:
    """Remove a process, which ends."""
    with database.write() as session:
        session.execute(delete(Heartbeat).where(Heartbeat.name == name))
