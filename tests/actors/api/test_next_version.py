"""Jobs that an ingress of the next version has accepted."""

import pytest
from sqlalchemy import select

from actors.jobs.tables import Job
from tests.actors.api import serving
from tests.actors.api.serving import create, open_client, serve, wait_for_end, working


@pytest.mark.parametrize("newer", [{"version": 2}, {"camera_path": "orbit"}, {"frames": 2005}, {"cache": "teacache"}])
def test_job_of_the_next_version_waits_for_its_worker_and_holds_up_no_other(settings, database, tmp_path, newer):
    engine = serving.Engine(tmp_path)
    with serve(settings) as address, open_client(address) as http:
        first, second = (create(http).json()["id"] for _ in range(2))
        with database.write() as session:
            job = session.scalars(select(Job).where(Job.id == first)).one()
            job.request = job.request | newer
        with working(settings, engine) as worker:
            assert wait_for_end(http, second)["status"] == "completed"
            waiting = worker.store.get(first)
            assert (waiting.status, waiting.attempts) == ("queued", 0)
            assert waiting.request.items() >= newer.items()
    assert len(engine.requests) == 1
