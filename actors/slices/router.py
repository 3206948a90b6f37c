"""Which replica of a pool gets a call: the one with the fewest, and of those one that holds the shape's programs.

Those whose slices have failed the call's request before come last.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import FIFOMixin, MultiplexMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from actors.slices.messages import SliceRequest

ARRIVES_S = 0.2  # a call that was given to a replica and isn't known to be there by then was cancelled, or is lost


class LeastLoadedRouter(FIFOMixin, MultiplexMixin, RequestRouter):
    """Asks all replicas how many calls they have, before each; those of one shape go in the order in which they came.

    Serve's own router looks at two of them at random, as it last knew them, and where a call is for a certain shape, at
    replicas that hold its programs only, for as long as one of them takes calls: slices stand idle beside others with
    a request at work and two in line. A replica makes a shape's programs once; a request waits for another's steps
    every time. Asking takes milliseconds, a stage seconds to minutes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As Serve makes its routers: one in every process that has a handle."""
        super().__init__(*args, **kwargs)
        self._turn = asyncio.Lock()
        self._arrived = asyncio.Event()  # the latest call is at its replica: the next one can be counted on it
        self._arrived.set()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are to be tried; none that doesn't answer."""
        if len(candidate_replicas) < 2:
            calls = {replica.replica_id: 0 for replica in candidate_replicas}
        else:
            async with self._turn:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._arrived.wait(), ARRIVES_S)
                calls = await self._calls(candidate_replicas)
                limits = {replica.replica_id: replica.max_ongoing_requests for replica in candidate_replicas}
                if any(count < limits[name] for name, count in calls.items()):  # one of them will get this call
                    self._arrived.clear()
        shape, avoid = "", frozenset[str]()
        if pending_request is not None:
            shape = pending_request.metadata.multiplexed_model_id
            avoid = next((one.avoid for one in pending_request.args if isinstance(one, SliceRequest)), avoid)
            pending_request.routing_context.should_backoff = True  # or Serve asks again at once when all are full
        order = sorted(
            (replica for replica in candidate_replicas if replica.replica_id in calls),
            key=lambda replica: (
                replica.replica_id.unique_id in avoid,
                calls[replica.replica_id],
                shape not in replica.multiplexed_model_ids,
            ),
        )
        return [[replica] for replica in order]

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """Serve tells how a replica has answered a call: it has it, or has refused it."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._arrived.set()

    async def _calls(self, replicas: Sequence[RunningReplica]) -> dict[ReplicaID, int]:
        """Return how many calls each has that answers."""
        limit_s = self.max_queue_len_response_deadline_s
        asked = [asyncio.wait_for(replica.get_queue_len(deadline_s=limit_s), limit_s) for replica in replicas]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return {
            replica.replica_id: calls
            for replica, calls in zip(replicas, answers, strict=True)
            if not isinstance(calls, BaseException)
        }
