"""What a driver holds of a running pipeline: handles to its pools, its status and snapshots."""

from collections.abc import Mapping
from typing import Any

from actors.observe.status_actor import StatusActor
from actors.pipeline.pools import handle
from actors.pipeline_spec import PipelineSpec
from actors.slices.snapshots import Snapshots


class PipelineConnection:
    """One driver's."""

    def __init__(
        self, spec: PipelineSpec, status: StatusActor, snapshots: Snapshots, handles: Mapping[str, Any]
    ) -> None:
        """handles: of the pools, by name, the caller's own; they are shut down with the connection."""
        self.settings, self.layout = spec.settings, spec.layout
        self.status, self.snapshots, self._handles = status, snapshots, handles

    @classmethod
    def open(cls, spec: PipelineSpec) -> "PipelineConnection":
        """Connect to a pipeline whose pools run (`pools.deploy`)."""
        name, pools = spec.settings.name, spec.layout.pools
        status, snapshots = StatusActor.connect(name), Snapshots(spec.settings.snapshots)
        return cls(spec, status, snapshots, {pool.name: handle(name, pool.name) for pool in pools})

    def stream(self, stage: str, shape: str | None = None) -> Any:
        """Return the handle to a stage's pool; of equally busy replicas, one that holds the shape is taken."""
        options: dict[str, Any] = {"stream": True} | ({} if shape is None else {"multiplexed_model_id": shape})
        return self._handles[self.layout.pool_of(stage).name].options(**options)

    def close(self) -> None:
        """Let go of the pools; before `ray.shutdown`, which the handles' threads don't notice."""
        for pool in self._handles.values():
            pool.shutdown()
