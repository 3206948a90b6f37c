"""When jobs will be done, compared with when the real queue is done with them; each segment takes a second."""

import heapq

import pytest

from actors.api.estimates import Estimator
from actors.api.foresight import foresee
from actors.jobs.queries import Turn
from actors.jobs.store import JobStore
from actors.jobs.tables import Job
from actors.jobs.values import Progress
from actors.jobs.work import WorkQueue

REQUEST = {"prompt": "a cat", "width": 96, "height": 64, "frames": 9, "steps": 1}
A, B = "ann", "bob"


@pytest.fixture
def queue(database):
    """Return a queue of which one job has completed, in a second."""
    store, work = JobStore(database), WorkQueue(database)
    submit(store, A)
    first = work.claim("w")
    first.stage_seconds = {"denoise": 1.0}
    work.complete(first, {})
    with database.write() as session:
        job = session.get(Job, first.sequence)
        job.ended_at = job.started_at + 1.0
    return store, work


def submit(store, owner, segments=1, priority=0):
    request = REQUEST | {"next_prompts": ["on"] * (segments - 1)}
    return store.submit(Job(owner=owner, request=request, priority=priority))[0]


class Pipeline:
    """Makes the queue's segments, so many at a time and a second each."""

    def __init__(self, work, places):
        self._work, self._places, self._busy = work, places, []
        self.now, self.ends = 0.0, {}

    def fill(self):
        while len(self._busy) < self._places and (job := self._work.claim("w")) is not None:
            heapq.heappush(self._busy, (self.now + 1.0, job.sequence, job))

    def run(self, until=float("inf")):
        self.fill()
        while self._busy and self._busy[0][0] <= until:
            self.now, _, job = heapq.heappop(self._busy)
            if job.segments_left == 1:
                self._work.complete(job, {})
                self.ends[job.id] = self.now
            else:
                segment = f"{job.id}-{len(job.segments)}"
                self._work.announce(job, {segment: 1})
                self._work.keep_segment(job, len(job.segments), segment, None)
                if not self._work.give_way(job):
                    heapq.heappush(self._busy, (self.now + 1.0, job.sequence, job))
            self.fill()


@pytest.mark.parametrize(
    ("places", "before", "own"),
    [
        (1, [(A, 6), (A, 6), (A, 6)], (B, 1)),
        (2, [(A, 7), (A, 7), (A, 7)], (B, 4)),
        (1, [(A, 6), (B, 1), (B, 1), (B, 1)], (A, 1)),
        (3, [(A, 1)] * 8 + [(B, 4)], (B, 5)),
        (2, [(A, 9), (B, 9, 1), ("cy", 1, 1)], (A, 3)),
    ],
)
def test_estimate_is_when_the_queue_is_done(queue, places, before, own):
    store, work = queue
    jobs = [submit(store, *fields) for fields in before]
    pipeline = Pipeline(work, places)
    pipeline.run(until=0.5)  # As many as there are places run by now, and are half-way through their segments.
    jobs.append(submit(store, *own))
    estimator = Estimator(store, places, "")
    looked = [store.look(job.id) for job in jobs]
    for job in looked:
        if job.status == "in_progress":
            job.progress = Progress(stage="denoise", eta_s=job.segments_left - 0.5)
    estimates = [estimator.estimate_eta_s(job) for job in looked]
    pipeline.run()
    ends = [pipeline.ends[job.id] - 0.5 for job in jobs]
    assert estimates[-1] == pytest.approx(ends[-1], rel=0.25, abs=1.0)
    assert estimates == pytest.approx(ends, rel=0.25, abs=2.0)


def test_job_that_has_just_come_is_estimated_from_those_around_it(queue):
    store, _ = queue
    for _ in range(6):
        submit(store, A)
    estimator = Estimator(store, 1, "")
    estimator.estimate_next_free_s()  # It looks at the queue now, and not again for seconds.
    late = [submit(store, B), submit(store, A), submit(store, B, priority=1)]
    estimates = [estimator.estimate_eta_s(store.look(job.id)) for job in late]
    assert estimates == pytest.approx([2, 7, 1], abs=1.1)


def test_job_that_only_joins_its_segments_waits_for_nobody():
    joining = Turn(0, 0, 0, A, 0)
    assert foresee([joining], [Turn(0, 1, 1, B, 3)], 1).pauses == {0: 0.0}
