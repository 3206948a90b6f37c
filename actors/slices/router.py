"""Which replica of a pool gets a call: the one with the fewest, and of those one that holds the shape's programs.

Those whose slices have failed the call's request before come last.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import Any, TypeVar

from ray.serve.request_router import FIFOMixin, MultiplexMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from actors.slices.messages import SliceRequest

ANSWERS_S = 0.2  # Replicas that take longer to say how many calls they have are left out, where others have said it.
ARRIVES_S = 0.2  # a call that was given to a replica and isn't known to be there by then was cancelled, or is lost
MAX_SAMPLED, MAX_ASKED = 24, 8  # Replicas looked at, and asked, for one call: what it costs ends to grow there.

Replica = TypeVar("Replica")
Facts = Callable[[Replica], tuple[Any, ...]]


def sample(replicas: Sequence[Replica], preference: Facts[Replica]) -> Sequence[Replica]:
    """Return the replicas to ask how many calls they have: all, or of very many some that are likely to have few.

    preference  of one replica, by what is known without asking; the least is the best
    """
    if len(replicas) <= MAX_ASKED:
        return replicas
    return sorted(random.sample(replicas, min(MAX_SAMPLED, len(replicas))), key=preference)[:MAX_ASKED]


def preference(name: str, calls: int, *, holds_programs: bool, avoid: Set[str]) -> tuple[bool, int, bool]:
    """Return by what replicas are compared for a call, the least being the best.

    avoid  names of replicas whose slices have failed the call's request
    """
    return name in avoid, calls, not holds_programs


class LeastLoadedRouter(FIFOMixin, MultiplexMixin, RequestRouter):
    """Asks replicas how many calls they have, before each; those of one shape go in the order in which they came.

    Of many replicas some are asked.

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
        self._mine: Counter[ReplicaID] = Counter()  # this process's calls at each replica

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are to be tried; none that doesn't answer."""
        shape, avoid = "", frozenset[str]()
        if pending_request is not None:
            shape = pending_request.metadata.multiplexed_model_id
            avoid = next((one.avoid for one in pending_request.args if isinstance(one, SliceRequest)), avoid)
            pending_request.routing_context.should_backoff = True  # or Serve asks again at once when all are full

        def compared(replica: RunningReplica, calls: int) -> tuple[bool, int, bool]:
            holds = shape in replica.multiplexed_model_ids
            return preference(replica.replica_id.unique_id, calls, holds_programs=holds, avoid=avoid)

        asked: Sequence[RunningReplica] = candidate_replicas
        if len(asked) < 2:
            calls = {replica.replica_id: 0 for replica in candidate_replicas}
        else:
            async with self._turn:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._arrived.wait(), ARRIVES_S)
                asked = sample(candidate_replicas, lambda one: compared(one, self._mine[one.replica_id]))
                calls = await self._calls(asked)
                limits = {replica.replica_id: replica.max_ongoing_requests for replica in asked}
                if any(count < limits[name] for name, count in calls.items()):  # one of them will get this call
                    self._arrived.clear()
        order = sorted(
            (replica for replica in asked if replica.replica_id in calls),
            key=lambda replica: compared(replica, calls[replica.replica_id]),
        )
        return [[replica] for replica in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Serve tells which replica has got a call."""
        super().on_request_routed(pending_request, replica_id, result)
        self._mine[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Serve tells that a replica is done with a call."""
        super().on_request_completed(replica_id, internal_request_id)
        self._mine[replica_id] -= 1
        if self._mine[replica_id] <= 0:
            del self._mine[replica_id]

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """Serve tells how a replica has answered a call: it has it, or has refused it."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._arrived.set()

    async def _calls(self, replicas: Sequence[RunningReplica]) -> dict[ReplicaID, int]:
        """Return how many calls each has that answers."""
        limit_s = self.max_queue_len_response_deadline_s
        asked = {
            asyncio.ensure_future(replica.get_queue_len(deadline_s=limit_s)): replica.replica_id for replica in replicas
        }
        answered, silent = await asyncio.wait(asked, timeout=min(ANSWERS_S, limit_s))
        if not answered:
            answered, silent = await asyncio.wait(asked, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for one in silent:  # the others needn't wait for it, once for every call
            one.cancel()
        return {asked[one]: one.result() for one in answered if not one.cancelled() and one.exception() is None}
