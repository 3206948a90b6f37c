"""What a driver holds of a running pipeline: handles to its pools, the queues before them, its status and snapshots."""

from typing import Any

from actors.observe.status_actor import StatusActor
from actors.pipeline.pools import MOST_ONGOING, handle
from actors.pipeline_spec import PipelineSpec
from actors.slices.scheduler import MOST_PAUSED, PriorityQueue
from actors.slices.snapshots import Snapshots


class PipelineConnection:
    """One driver's. The pools must run (`pools.deploy`)."""

    def __init__(self, spec: PipelineSpec) -> None:
        settings, pools = spec.settings, spec.layout.pools
        self.settings, self.layout = settings, spec.layout
        self.status = StatusActor.connect(settings.name)
        self.snapshots = Snapshots(settings.snapshots)
        self._handles = {pool.name: handle(settings.name, pool.name) for pool in pools}
        # Serve's own queue knows no priorities: what the slices can't take waits here, and room at each is kept for
        # what is more urgent. A pool that is smaller than it may become has Serve's queue besides, from which it grows.
        self._queues = {
            pool.name: PriorityQueue(pool.replicas.maximum * MOST_ONGOING, pool.replicas.maximum * MOST_PAUSED)
            for pool in pools
        }

    def queue(self, stage: str) -> PriorityQueue:
        """Return the queue before the pool that hosts a denoising stage."""
        return self._queues[self.layout.pool_of(stage).name]

    def stream(self, stage: str, shape: str | None = None) -> Any:
        """Return the handle to a stage's pool; of equally busy replicas, one that holds the shape is taken."""
        options: dict[str, Any] = {"stream": True} | ({} if shape is None else {"multiplexed_model_id": shape})
        return self._handles[self.layout.pool_of(stage).name].options(**options)

    def close(self) -> None:
        """Let go of the pools; before `ray.shutdown`, which the handles' threads don't notice."""
        for pool in self._handles.values():
            pool.shutdown()
