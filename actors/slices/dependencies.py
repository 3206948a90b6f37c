"""What a slice's leader depends on: Serve, Ray and the cluster, or a simulation's stand-ins for them."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve

from actors.observe.status_actor import StatusActor
from actors.pipeline_spec import PipelineSettings
from actors.slices.references import ObjectStore
from cluster.draining import find_drain_s
from cluster.gang.slice import Slice, take
from wan_tpu.storage.base import Storage
from wan_tpu.storage.opening import open_storage


class RayObjects:
    """Ray's object store."""

    def get(self, ref: Any) -> Any:
        return ray.get(ref)

    def put(self, value: Any) -> Any:
        """Return a reference to an object of this process."""
        return ray.put(value)


@dataclass(frozen=True)
class LeaderDependencies:
    """What one leader depends on."""

    replica: str  # Serve's name for this process.
    status: StatusActor
    snapshots: Storage  # Where states of unfinished requests are stored.
    take: Callable[..., Slice] = take  # Waits for a slice and starts its hosts, as `cluster.gang.slice.take` does.
    # Returns in how many seconds hosts will be taken away, as `cluster.draining.find_drain_s` does.
    find_drain_s: Callable[[Iterable[str]], float | None] = find_drain_s
    store: ObjectStore = field(default_factory=RayObjects)
    end_process: Callable[[], object] = lambda: os._exit(1)

    @classmethod
    def of_replica(cls, settings: PipelineSettings) -> "LeaderDependencies":
        """Return the dependencies of this process, which is a replica."""
        replica = serve.get_replica_context().replica_id.unique_id
        return cls(replica, StatusActor.connect(settings.name), open_storage(settings.snapshots))
