"""Choose the replica of a pool for a call: the one with the fewest calls, and among equals one that holds the program.

Replicas whose slices have failed the call's request before come last.
"""

import asyncio
import contextlib
import dataclasses
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import Any, TypeVar

from ray.serve.request_router import FIFOMixin, MultiplexMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from actors.observe.logs import log_event
from actors.slices.messages import SliceRequest

log = logging.getLogger(__name__)

ANSWER_S = 0.2  # Replicas that take longer to say how many calls they have are left out, if others have answered.
ARRIVAL_S = 0.2  # After this time, a call that isn't known to have reached its replica counts as cancelled or lost.
MAX_SAMPLED, MAX_ASKED = 24, 8  # The most replicas compared, and asked, for one call, to bound the cost of a call.

Replica = TypeVar("Replica")
Rank = Callable[[Replica], tuple[Any, ...]]
ReplicaRank = tuple[bool, int, bool]  # The result of `rank_replica`.


def sample(replicas: Sequence[Replica], rank: Rank[Replica]) -> Sequence[Replica]:
    """Return the replicas to ask how many calls they have: all, or if there are many, some that are likely to have few.

    Args:
        rank: Returns a replica's rank as far as it is known without asking; the lowest is the best.
    """
    if len(replicas) <= MAX_ASKED:
        return replicas
    return sorted(random.sample(replicas, min(MAX_SAMPLED, len(replicas))), key=rank)[:MAX_ASKED]


def rank_replica(name: str, calls: int, *, holds_program: bool, avoid: Set[str]) -> ReplicaRank:
    """Return a replica's rank for a call; the lowest is the best.

    Args:
        holds_program: Whether it holds the program of the call's shapes.
        avoid: Names of replicas whose slices have failed the call's request.
    """
    return name in avoid, calls, not holds_program


def explain_choice(ranks: Sequence[ReplicaRank], index: int, *, needs_program: bool = True) -> str:
    """Return a human-readable reason why a call went to one of the replicas that answered.

    Args:
        ranks: The ranks of all replicas that answered, the best first.
        index: The index in `ranks` of the replica that took the call. The replicas before it were full.
        needs_program: Whether the call needs a program, which some replicas hold already.
    """
    failed, calls, lacks_program = ranks[index]
    other_counts = [rank[1] for i, rank in enumerate(ranks) if i != index]
    if not other_counts:
        return "the only replica that answered"
    fewest, most = min(other_counts), max(other_counts)
    reasons = [f"{calls} calls, others {fewest}" + (f" to {most}" if most > fewest else "")]
    if needs_program:
        reasons.append("lacks the program" if lacks_program else "holds the program")
    if index:
        reasons.append(f"{index} ranked before it {'was' if index == 1 else 'were'} full")
    if failed:
        reasons.append("has failed this request before, as have all that are left")
    elif count := sum(rank[0] for rank in ranks):
        reasons.append(f"passes over {count} that failed this request")
    return "; ".join(reasons)


class LeastLoadedRouter(FIFOMixin, MultiplexMixin, RequestRouter):
    """Asks replicas, or some of very many, how many calls they have before each call; calls go in order of arrival.

    Serve's own router compares two random replicas, by what it last knew of them. For a call that needs a certain
    program, it considers only replicas that hold the program, as long as one of them accepts calls. So slices would
    stay idle beside others with one running and two waiting requests. A replica compiles a program only once, while
    every request that queues behind another waits for all of its steps. Asking takes milliseconds, a stage seconds to
    minutes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take Serve's arguments. Serve makes one router in every process that has a handle."""
        super().__init__(*args, **kwargs)
        self._turn = asyncio.Lock()
        self._arrived = asyncio.Event()  # Set when the latest call has reached its replica, which then counts it.
        self._arrived.set()
        self._calls: Counter[ReplicaID] = Counter()  # The number of this process's calls at each replica.

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas that answered, in the order in which to try them."""
        program, avoid = "", frozenset[str]()
        if pending_request is not None:
            program = pending_request.metadata.multiplexed_model_id
            avoid = next((arg.avoid for arg in pending_request.args if isinstance(arg, SliceRequest)), avoid)
            pending_request.routing_context.should_backoff = True  # Otherwise Serve retries without a pause.

        def rank(replica: RunningReplica, calls: int) -> ReplicaRank:
            holds = program in replica.multiplexed_model_ids
            return rank_replica(replica.replica_id.unique_id, calls, holds_program=holds, avoid=avoid)

        candidates: Sequence[RunningReplica] = candidate_replicas
        if len(candidates) < 2:
            calls = {replica.replica_id: 0 for replica in candidate_replicas}
        else:
            async with self._turn:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._arrived.wait(), ARRIVAL_S)
                candidates = sample(candidate_replicas, lambda replica: rank(replica, self._calls[replica.replica_id]))
                calls = await self._count_calls(candidates)
                limits = {replica.replica_id: replica.max_ongoing_requests for replica in candidates}
                # If a replica has room, this call is sent to one, and the next call waits for its arrival.
                if any(count < limits[name] for name, count in calls.items()):
                    self._arrived.clear()
        order = sorted(
            (replica for replica in candidates if replica.replica_id in calls),
            key=lambda replica: rank(replica, calls[replica.replica_id]),
        )
        if pending_request is not None:
            ranks = [rank(replica, calls[replica.replica_id]) for replica in order]
            choices = {
                replica.replica_id.unique_id: explain_choice(ranks, i, needs_program=bool(program))
                for i, replica in enumerate(order)
            }
            # The replica that accepts the call reports the reason for its choice with the first span.
            pending_request.args = [
                dataclasses.replace(arg, choices=choices) if isinstance(arg, SliceRequest) else arg
                for arg in pending_request.args
            ]
        return [[replica] for replica in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count a call that Serve has sent to a replica, and log the reason for the choice."""
        super().on_request_routed(pending_request, replica_id, result)
        self._calls[replica_id] += 1
        for arg in pending_request.args:
            if isinstance(arg, SliceRequest):
                name, why = replica_id.unique_id, arg.choices.get(replica_id.unique_id)
                log_event(log, "goes to", job=arg.key, slice=f"{replica_id.deployment_id.name}/{name}", why=why)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Discount a call that a replica has completed."""
        super().on_request_completed(replica_id, internal_request_id)
        self._calls[replica_id] -= 1
        if self._calls[replica_id] <= 0:
            del self._calls[replica_id]

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """Note that a replica has accepted or refused a call."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._arrived.set()

    async def _count_calls(self, replicas: Sequence[RunningReplica]) -> dict[ReplicaID, int]:
        """Return how many calls each replica has, of those that answer."""
        limit_s = self.max_queue_len_response_deadline_s
        tasks = {
            asyncio.ensure_future(replica.get_queue_len(deadline_s=limit_s)): replica.replica_id for replica in replicas
        }
        done, silent = await asyncio.wait(tasks, timeout=min(ANSWER_S, limit_s))
        if not done:
            done, silent = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for answer in silent:  # Otherwise every call would wait for these replicas.
            answer.cancel()
        return {tasks[each]: each.result() for each in done if not each.cancelled() and each.exception() is None}
