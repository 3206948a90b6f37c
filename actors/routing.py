"""Which replica of a pool gets a call: the one with the fewest, and of those one that holds the shape's programs."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import FIFOMixin, MultiplexMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

UNSENT_S = 1.0  # within it a call that was given to a replica is there, or will never be


class FewestCalls(FIFOMixin, MultiplexMixin, RequestRouter):
    """Asks all replicas how many calls they have, before each; those of one shape go in the order in which they came.

    Serve's own router looks at two of them at random, as it last knew them, and where a call is for a certain shape, at
    replicas that hold its programs only, for as long as one of them takes calls: slices stand idle beside others with
    a request at work and two in line. A replica makes a shape's programs once; a request waits for another's steps
    every time. Asking takes milliseconds, a stage seconds to minutes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As Serve makes its routers: one in every process that has a handle."""
        super().__init__(*args, **kwargs)
        self._given: list[tuple[ReplicaID, float]] = []  # calls that replicas may not know of yet, and since when

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are to be tried; none that doesn't answer."""
        shape = ""
        if pending_request is not None:
            shape = pending_request.metadata.multiplexed_model_id
            pending_request.routing_context.should_backoff = True  # or Serve asks again at once when all are full
        calls = await self._calls(candidate_replicas)
        self._given = [(to, since) for to, since in self._given if since > time.monotonic() - UNSENT_S]
        order = sorted(
            (replica for replica in candidate_replicas if replica.replica_id in calls),
            key=lambda replica: (
                calls[replica.replica_id] + sum(to == replica.replica_id for to, _ in self._given),
                shape not in replica.multiplexed_model_ids,
            ),
        )
        if order:
            self._given.append((order[0].replica_id, time.monotonic()))
        return [[replica] for replica in order]

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """Serve tells how a replica has answered a call: it knows of it now, or has refused it."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        arrived = next((given for given in self._given if given[0] == replica_id), None)
        if arrived is not None:
            self._given.remove(arrived)

    async def _calls(self, replicas: Sequence[RunningReplica]) -> dict[ReplicaID, int]:
        """Return how many calls each has that answers."""
        if len(replicas) < 2:
            return {replica.replica_id: 0 for replica in replicas}
        limit_s = self.max_queue_len_response_deadline_s
        asked = [asyncio.wait_for(replica.get_queue_len(deadline_s=limit_s), limit_s) for replica in replicas]
        told = await asyncio.gather(*asked, return_exceptions=True)
        return {
            replica.replica_id: calls
            for replica, calls in zip(replicas, told, strict=True)
            if not isinstance(calls, BaseException)
        }
