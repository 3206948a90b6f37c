"""Heartbeats of the processes of a service with their metrics, so that any of them can answer for all."""

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


class Heartbeats:
    """The heartbeats in a database. Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def send(self, process: Heartbeat) -> None:
        """Record a heartbeat in place of the process's last one. A process's name is its own: nobody else writes it."""
        with self._database.write() as session:
            now = self._database.now(session)
            session.merge(dataclasses.replace(process, received_at=now))
            session.execute(delete(Heartbeat).where(Heartbeat.received_at < now - FORGET_S))

    def read(self, within_s: float) -> list[Heartbeat]:
        """Return the heartbeats of the last seconds, by name."""
        with self._database.read() as session:
            since = self._database.now(session) - within_s
            query = select(Heartbeat).where(Heartbeat.received_at >= since).order_by(Heartbeat.name)
            return list(session.scalars(query))

    def remove(self, name: str) -> None:
        """Remove a process, which ends."""
        with self._database.write() as session:
            session.execute(delete(Heartbeat).where(Heartbeat.name == name))
