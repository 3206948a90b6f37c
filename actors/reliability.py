"""Every time-out, retry, lease and heartbeat that an operator may want to change, in one class.

The command line reaches all of it, and so does a service's config: `--timeout NAME=SECONDS` for the fields that end in
`_s`, `--attempts NAME=COUNT` for those that end in `_attempts` (`actors.commands.timeouts`). Constants elsewhere are
pauses and guards that no installation needs to change.
"""

from dataclasses import dataclass

from cluster.gang.protocol import Timeouts
from wan_tpu.storage.base import OUTAGE_S, OUTAGE_VARIABLE


@dataclass(frozen=True)
class ReliabilitySettings(Timeouts):
    """Time-outs and retries of a pipeline and its service.

    The time-outs of one slice (place, start, join, build, heartbeat, grace, hung, poll, chips) are inherited from
    `cluster.gang.protocol.Timeouts`, because `cluster` imports nothing of ours.
    """

    replica_wait_s: float = 10  # How long a request waits for a place at one replica before it looks for another.
    # Time between two health checks of a replica, each of which also looks for a drain that has begun.
    health_s: float = 2
    finish_s: float = 3600  # How long a replica that is being removed may go on with the requests that it has.
    hand_over_s: float = 5  # How much of a drain is kept for copying a state out of the slice and writing it.
    # How long the pools may take to check a request's adapters before anything is computed. After that, the request
    # starts, and a pool refuses a bad adapter when it needs it.
    adapters_s: float = 30
    snapshots_s: float = 600  # How long a request waits while the storage of snapshots doesn't say whether it has one.
    # How long a call to a bucket that doesn't answer is repeated, in every process of the pipeline.
    storage_s: float = OUTAGE_S
    # How long a worker keeps a job without renewing its lease; then another worker takes the job. It must span several
    # renewals, and be longer than the database may pause.
    lease_s: float = 30
    # Time between two renewals of a lease. A client sees a step, and a worker a cancellation, that late.
    renewal_s: float = 1
    queue_check_s: float = 2  # Time between two looks for jobs whose deadline has passed or whose lease has run out.
    check_in_s: float = 5  # Time between two check-ins of a service's process.
    absent_s: float = 60  # A process that hasn't checked in for this long counts as gone.
    pipeline_pause_s: float = 5  # How long a worker claims no job after one has met a pipeline that can't be used.
    answer_s: float = 120  # How long a request that waits for its video is held. After that, its client has to poll.
    # How long an image of another server, or the answer of a webhook, may take: names, connections and all.
    fetch_s: float = 20
    # How long a replaced ingress may go on answering, and a worker may take to give its jobs back.
    shutdown_s: float = 30
    # Attempts at a stage without any progress of its request, when slices or payloads are lost.
    stage_attempts: int = 5
    # Slices in a row, each about to be taken away, that may send a request on without any progress.
    move_attempts: int = 600
    slice_attempts: int = 3  # Different requests in a row that a slice may fail before it is replaced.
    handle_attempts: int = 10  # Attempts at learning from Ray Serve which replicas a pool has, of two seconds each.
    job_attempts: int = 20  # Attempts at a job while the pipeline or the database fails, not the job.
    # Workers that a job may lose before it fails, since the job itself may be what kills them.
    worker_attempts: int = 10
    input_attempts: int = 8  # Attempts at reading a job's input while storage fails, with growing pauses.


def build_environment(settings: ReliabilitySettings) -> dict[str, str]:
    """Return the environment variables of a process that follows the settings; none where they are the defaults.

    Storage is opened in many places, on hosts as well, so its time-out holds for a whole process.
    """
    return {} if settings.storage_s == OUTAGE_S else {OUTAGE_VARIABLE: f"{settings.storage_s:g}"}
