"""The latest check-in of each process counts, unless it is too old."""

import dataclasses

from sqlalchemy import update

from actors.jobs.check_ins import FORGET_S, check_in, check_out, list_check_ins
from actors.jobs.tables import CheckIn


def test_latest_check_in_of_each_process_is_kept(database):
    worker, ingress = (
        CheckIn(name=name, kind=kind, metrics="") for name, kind in (("w1", "worker"), ("i1", "ingress"))
    )
    check_in(database, worker)
    latest = dataclasses.replace(worker, metrics="two")
    check_in(database, latest)
    check_in(database, ingress)
    assert list_check_ins(database, within_s=60) == [ingress, latest]
    age(database, "w1", 100)
    assert list_check_ins(database, within_s=60) == [ingress]
    assert list_check_ins(database, within_s=200) == [ingress, latest]
    check_out(database, "i1")
    assert list_check_ins(database, within_s=60) == []
    age(database, "w1", FORGET_S)
    check_in(database, ingress)  # A new process: rows of those that are long gone are deleted.
    assert list_check_ins(database, within_s=10 * FORGET_S) == [ingress]


def age(database, name, seconds):
    with database.write() as session:
        now = database.now(session)
        session.execute(update(CheckIn).where(CheckIn.name == name).values(received_at=now - seconds))
