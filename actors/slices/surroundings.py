"""What a leader of a slice has around it: Serve, Ray, the cluster. A simulation gives it others."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve

from actors.observe.status_actor import StatusActor
from actors.pipeline_spec import PipelineSettings
from actors.slices.references import ObjectStore
from cluster.draining import draining_for
from cluster.gang.slice import Slice, take
from wan_tpu.storage.base import Storage
from wan_tpu.storage.opening import open_storage


class RayObjects:
    """Ray's object store."""

    def get(self, ref: Any) -> Any:
        """Return an object."""
        return ray.get(ref)

    def put(self, value: Any) -> Any:
        """Return a reference to an object of this process."""
        return ray.put(value)


@dataclass(frozen=True)
class Surroundings:
    """What one leader uses.

    replica       Serve's name for this process
    snapshots     where states of unfinished requests lie
    take          waits for a slice and starts its hosts, as `cluster.gang.slice.take`
    draining_for  tells how long hosts are there still, as `cluster.draining.draining_for`
    end_process   ends this process at once
    """

    replica: str
    status: StatusActor
    snapshots: Storage
    take: Callable[..., Slice] = take
    draining_for: Callable[[Iterable[str]], float | None] = draining_for
    store: ObjectStore = field(default_factory=RayObjects)
    end_process: Callable[[], object] = lambda: os._exit(1)

    @classmethod
    def of_replica(cls, settings: PipelineSettings) -> "Surroundings":
        """Return those of the replica that this process is."""
        replica = serve.get_replica_context().replica_id.unique_id
        return cls(replica, StatusActor.connect(settings.name), open_storage(settings.snapshots))
