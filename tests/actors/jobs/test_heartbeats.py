"""The latest heartbeat of each process counts, unless it is too old."""

import dataclasses

from sqlalchemy import update

from actors.jobs.heartbeats import FORGET_S, read_heartbeats, remove_heartbeat, send_heartbeat
from actors.jobs.tables import Heartbeat


def test_the_latest_heartbeat_of_each_process_is_kept(database):
    worker, ingress = (
        Heartbeat(name=name, kind=kind, metrics="") for name, kind in (("w1", "worker"), ("i1", "ingress"))
    )
    send_heartbeat(database, worker)
    latest = dataclasses.replace(worker, metrics="two")
    send_heartbeat(database, latest)
    send_heartbeat(database, ingress)
    assert read_heartbeats(database, within_s=60) == [ingress, latest]
    age(database, "w1", 100)
    assert read_heartbeats(database, within_s=60) == [ingress]
    assert read_heartbeats(database, within_s=200) == [ingress, latest]
    remove_heartbeat(database, "i1")
    assert read_heartbeats(database, within_s=60) == []
    age(database, "w1", FORGET_S)
    send_heartbeat(database, ingress)  # A new process: rows of those that are long gone are deleted.
    assert read_heartbeats(database, within_s=10 * FORGET_S) == [ingress]


def age(database, name, seconds):
    with database.write() as session:
        now = database.now(session)
        session.execute(update(Heartbeat).where(Heartbeat.name == name).values(received_at=now - seconds))
