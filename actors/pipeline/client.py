"""A client of a pipeline that may go away and come back while jobs wait: it reopens the driver whenever necessary."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from actors.engine import GeneratedVideo, OnEvent, OnFragment, OnPreview
from actors.errors import PipelineError, RequestFailed
from actors.observe.status_actor import StatusActor
from actors.pipeline.driver import PipelineDriver
from actors.pipeline.pools import list_live_replicas
from actors.pipeline_spec import PipelineSpec
from actors.slices.snapshots import Snapshots, delete_snapshots
from wan_tpu.plan import RequestPlan

T = TypeVar("T")
_READY_S = 20.0  # Time limit of the readiness check, which normally takes milliseconds.


class PipelineClient:
    """The engine of the service's worker."""

    def __init__(self, spec: PipelineSpec) -> None:
        self._spec, self.model = spec, spec.model
        self._snapshots = Snapshots(spec.settings.snapshots)
        self._last: dict[str, PipelineDriver] = {}  # The latest driver of each request until `forget`, by id.
        self._lock = asyncio.Lock()
        self._current: PipelineDriver | None = None
        self._checking: asyncio.Future[None] | None = None
        self._users: Counter[PipelineDriver] = Counter()  # The last user of a replaced driver closes it.

    async def generate(
        self,
        plan: RequestPlan,
        *,
        id: str,
        on_event: OnEvent,
        priority: int = 0,
        on_fragment: OnFragment | None = None,
        on_preview: OnPreview | None = None,
    ) -> GeneratedVideo:
        """Make one video, as `PipelineDriver.generate` does; also raises `PipelineError` if there is no pipeline."""
        async with self._lock:
            if self._current is None:
                self._current = await asyncio.to_thread(_call_explained, PipelineDriver, self._spec)
            driver = self._current
        self._users[driver] += 1
        self._last[id] = driver
        try:
            callbacks: dict[str, Any] = {"on_event": on_event, "on_fragment": on_fragment, "on_preview": on_preview}
            return await driver.generate(plan, id=id, priority=priority, **callbacks)
        except Exception as error:
            works = isinstance(error, RequestFailed) and error.code != "lost"
            if driver is self._current and not works:  # Other requests continue with the old driver.
                self._current = None
            raise
        finally:
            self._users[driver] -= 1
            if driver is not self._current and not self._users[driver]:
                del self._users[driver]
                self._last = {other: last for other, last in self._last.items() if last is not driver}
                await asyncio.to_thread(driver.close)

    async def forget(self, id: str) -> None:
        """Delete the snapshots of a request whose outcome is recorded; any that can't be deleted now become orphans."""
        if (driver := self._last.pop(id, None)) is not None:
            await driver.forget(id)
        else:
            await asyncio.to_thread(delete_snapshots, self._snapshots.delete_all_of, id)

    async def check_ready(self) -> None:
        """Raise `PipelineError` unless every pool has a replica that accepts requests."""
        if self._checking is None:  # Otherwise the last check is still running, and occupies its thread.
            self._checking = asyncio.get_running_loop().run_in_executor(None, _check, self._spec)
        await asyncio.wait([self._checking], timeout=_READY_S)
        if not self._checking.done():
            raise PipelineError(f"the pipeline doesn't answer within {_READY_S:g} s; try again")
        task, self._checking = self._checking, None
        task.result()

    def close(self) -> None:
        if self._current is not None:
            self._current.close()


def _check(spec: PipelineSpec) -> None:
    name = spec.settings.name
    alive = _call_explained(list_live_replicas, name, spec.layout)
    reported = _call_explained(lambda: StatusActor.connect(name).read_or_none())
    if reported is None:  # Without the status, which is optional, every live replica counts as ready.
        able = {replica.partition("/")[0] for replica in alive}
    else:
        unready = {name for name, replica in reported.replicas.items() if replica.activity not in ("idle", "busy")}
        able = {replica.partition("/")[0] for replica in alive - unready}
    if missing := [pool.name for pool in spec.layout.pools if pool.name not in able]:
        raise PipelineError(f"no replica of {', '.join(missing)} is ready; try again")


def _call_explained(function: Callable[..., T], *args: Any) -> T:
    """Call Ray or Serve, and raise `PipelineError` for any of the various errors of a cluster that comes or goes."""
    try:
        return function(*args)
    except PipelineError:
        raise
    except Exception as error:
        raise PipelineError(f"there is no pipeline now: {type(error).__name__}: {error}") from error
