"""The driver of a pipeline takes each request through the pools. It holds no payloads.

Its callers decide how many requests it runs at a time, and the slices decide which request is next.
"""

import asyncio
import contextlib
import secrets

from actors.engine import GeneratedVideo, OnEvent, OnFragment, OnPreview
from actors.errors import RequestFailed
from actors.observe.status_actor import RENEW_S, Outcome
from actors.pipeline.connection import PipelineConnection
from actors.pipeline.request_run import RequestRun
from actors.pipeline_spec import PipelineSpec
from actors.slices.references import RefStore, RequestScope
from actors.slices.snapshots import delete_snapshots, name_of
from wan_tpu.plan import RequestPlan


class PipelineDriver:
    """The engine of batches and of the online service: a running pipeline, ready to make videos."""

    def __init__(
        self, spec: PipelineSpec, connection: PipelineConnection | None = None, ref_store: RefStore | None = None
    ) -> None:
        """Use the given connection and store, or open them, for which the pools must be running (`pools.deploy`)."""
        self.spec, self.model = spec, spec.model
        self._connection = connection or PipelineConnection.open(spec)
        self._ref_store = ref_store or RefStore()
        self._name = f"driver-{secrets.token_hex(8)}"
        self._inside: set[str] = set()
        self._renewing: asyncio.Task[None] | None = None
        # The requests that may have snapshots, by id. An id may have several scopes: when a cancelled request is
        # submitted again, a slice may still be writing a snapshot for its first run.
        self._scopes: dict[str, list[tuple[str, RequestScope]]] = {}

    async def generate(
        self,
        plan: RequestPlan,
        *,
        id: str,
        on_event: OnEvent = lambda span: None,
        priority: int = 0,
        on_fragment: OnFragment | None = None,
        on_preview: OnPreview | None = None,
    ) -> GeneratedVideo:
        """Make one video.

        Args:
            id: The request's name in spans, logs and snapshots; an unfinished request continues from its snapshots.
            on_event: Called with a `Span` whenever a slice has done something for the request.
            priority: Requests of higher priority go first. At the experts' slices they run between two steps of a
                request of lower priority.
            on_fragment: Called with each fragment of the video while it is decoded, in order. With None, no fragments
                are made.
            on_preview: Called with pictures of the unfinished video. With None, none are made.

        Raises:
            RequestFailed: The video can't be made.
        """
        if id in self._inside:
            raise RequestFailed(
                f"a request with the id {id} is already running; wait for it, or give this one another id", "invalid"
            )
        self._inside.add(id)
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())
        outcome: Outcome = "failed"
        try:
            self._connection.status.report_request(id, "waiting")
            settings = self._connection.settings
            model = f"{settings.checkpoint} {settings.dtype}"
            snapshots = await asyncio.to_thread(name_of, id, plan.request, model)
            with contextlib.closing(self._ref_store.open_scope()) as scope:
                callbacks = on_fragment, on_preview
                run = RequestRun(self._connection, id, plan, on_event, priority, scope, snapshots, *callbacks)
                self._scopes.setdefault(id, []).append((run.snapshots, scope))
                video = await run.run()
            outcome = "done"
            return video
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._inside.remove(id)
            self._connection.status.report_end(id, outcome)

    async def _renew(self) -> None:
        """Report regularly which requests are under way, so that the status drops the requests of a killed driver."""
        while self._inside:
            await asyncio.sleep(RENEW_S)
            self._connection.status.report_requests(self._name, list(self._inside))

    async def forget(self, id: str) -> None:
        """Delete the snapshots of a request whose video or failure is durable by now."""
        scopes = self._scopes.pop(id, [])
        for _, scope in scopes:
            scope.finish()  # Before the deletion, so that a slice that is still writing a snapshot deletes it itself.
        for snapshots in dict.fromkeys(snapshots for snapshots, _ in scopes):
            await asyncio.to_thread(delete_snapshots, self._connection.snapshots.delete, snapshots)

    def close(self) -> None:
        """Release the pools. Call this before `ray.shutdown`."""
        self._connection.close()
