"""A driver's connection to a running pipeline: handles to its pools, its status and snapshots."""

from collections.abc import Mapping
from typing import Any

from actors.observe.status_actor import StatusActor
from actors.pipeline.pools import open_handle
from actors.pipeline_spec import PipelineSpec
from actors.slices.snapshots import Snapshots


class PipelineConnection:
    def __init__(
        self, spec: PipelineSpec, status: StatusActor, snapshots: Snapshots, handles: Mapping[str, Any]
    ) -> None:
        """Use handles of the pools, by name. Only this connection may use them, since it shuts them down on closing."""
        self.settings, self.layout, self.model = spec.settings, spec.layout, spec.model
        self.status, self.snapshots, self._handles = status, snapshots, handles

    @classmethod
    def open(cls, spec: PipelineSpec) -> "PipelineConnection":
        """Connect to a pipeline whose pools are already running (see `pools.deploy`)."""
        name, pools = spec.settings.name, spec.layout.pools
        status, snapshots = StatusActor.connect(name), Snapshots(spec.settings.snapshots)
        attempts = spec.settings.reliability.handle_attempts
        return cls(spec, status, snapshots, {pool.name: open_handle(name, pool.name, attempts) for pool in pools})

    def open_stream(self, stage: str, program: str | None = None) -> Any:
        """Return a handle to a stage's pool. Among equally busy replicas it prefers one that holds the program."""
        options: dict[str, Any] = {"stream": True} | ({} if program is None else {"multiplexed_model_id": program})
        return self._handles[self.layout.find_pool(stage).name].options(**options)

    def close(self) -> None:
        """Release the pools. Call this before `ray.shutdown`, which does not stop the handles' threads."""
        for pool in self._handles.values():
            pool.shutdown()
