"""Check what must hold when a simulated run is over."""

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tests.actors.simulation.slices import expected_fragments, video_of
from tests.actors.simulation.submissions import Submission

if TYPE_CHECKING:
    from tests.actors.simulation.scenario import Run

KILLED = "its driver was killed"


def check_submission(run: "Run", submission: Submission) -> Iterator[str]:
    """Yield the problems with a request's outcome and with the steps that were computed for it."""
    kind = submission.plan.request.prompt.split()[0]
    expected = {"bad": "invalid", "nan": "unhealthy"}.get(kind)
    if submission.ended != 1:
        yield f"{submission.id} has ended {submission.ended} times"
    elif submission.failure not in (expected, "cancelled"):
        yield f"{submission.id} has failed as {submission.failure}, which is not its fault"
    elif submission.failure is None and submission.video != video_of(submission.plan):
        yield f"{submission.id} has become another video"
    done = [step for step, _, _ in run.world.steps[submission.id]]
    repeated, excuses = len(done) - len(set(done)), run.world.excuses[submission.id]
    # If snapshots can be written, a loss costs the steps since the last complete one. If a driver is killed, more are
    # computed, because slices notice only after some seconds that nobody waits for the request.
    each = {why: run.spec.settings.snapshot_every + (11 if why == KILLED else 1) for _, why in excuses}
    worst = sum(each[why] for _, why in excuses) if not run.bucket.was_ill else 0
    # If a drained slice can't write a snapshot, the request goes back to the last one that could be written.
    unexplained = not excuses and not (run.bucket.was_ill and run.was_drained)
    if repeated and (unexplained or repeated > worst > 0):
        yield f"{submission.id}: {repeated} steps were repeated: {run.world.steps[submission.id]}; reasons: {excuses}"
    if submission.fragments is not None and submission.failure is None:
        yield from check_fragments(submission)
    all_steps = range(submission.plan.first_step + 1, submission.plan.request.steps + 1)
    if submission.failure is None and set(done) != set(all_steps):
        yield f"{submission.id}: steps were left out: {done}"


def check_fragments(submission: Submission) -> Iterator[str]:
    """Yield the problems with a video's fragments. Every run must begin like the last one, which must be complete."""
    whole, runs = expected_fragments(submission.plan), defaultdict(list)
    for fragment in submission.fragments or ():
        if fragment.run < len(runs) - 1:
            yield f"{submission.id}: a fragment of run {fragment.run} comes after run {len(runs) - 1}"
        runs[fragment.run].append((fragment.index, fragment.content))
    expected = list(enumerate(whole))
    if sorted(runs) != list(range(len(runs))) or runs[len(runs) - 1] != expected:
        yield f"{submission.id}: its fragments are not the video: {dict(runs)}"
    yield from (
        f"{submission.id}: run {run} has other fragments: {fragments}"
        for run, fragments in runs.items()
        if fragments != expected[: len(fragments)]
    )


def find_leftovers(run: "Run") -> dict[str, Any]:
    """Return everything that is still held, queued or stored, although no video is being made."""
    left: dict[str, Any] = defaultdict(list)
    for pool in run.pools.values():
        if len(pool.ready) != len(pool.replicas):
            left["replicas that don't come back"].append(pool.pool.name)
        for replica in pool.ready:
            runner = replica.leader._runner
            scheduler = runner.scheduler
            queues = [scheduler, scheduler.device, scheduler.places, scheduler.other_places]
            leftovers = {
                "held on hosts": replica.slice.host.list_keys() if replica.slice else None,
                "streams": replica.streams,
                "work": runner.work,
                "queued": [admission for queue in queues for admission in (*queue._inside, *queue._waiting)],
                "paused": scheduler._paused,
                "staying": replica.leader._drain._keepers,
                "snapshots being taken": [*runner._snapshotter._copying, *runner._snapshotter._writing],
            }
            for name, values in leftovers.items():
                if values:
                    left[name].append((replica.process.name, values))
    for driver in run.drivers:
        store = driver.ref_store
        if driver.engine._inside or store._scopes or store._latents:
            left["in a driver"].append((driver.process.name, driver.engine._inside, store._scopes, store._latents))
    run.status.refresh()
    # The status keeps a request for an hour if its driver was killed before reporting its end.
    ids = {submission.id for submission in run.submissions if not submission.is_orphaned}
    if requests := run.status.read().requests.keys() & ids:
        left["said to be under way"] = sorted(requests)
    if run.bucket.content and not run.bucket.failures:
        left["snapshots"] = sorted(run.bucket.content)
    return left
