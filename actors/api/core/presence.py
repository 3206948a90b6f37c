"""The presence of an ingress among the service's processes: its check-ins, everybody's metrics, and readiness."""

import contextlib
import logging
import time

from prometheus_client import generate_latest

from actors.api.metrics import Meters, ServiceMetrics
from actors.api.settings import ServiceSettings
from actors.jobs import deliveries
from actors.jobs.check_ins import check_in, list_check_ins, make_process_name
from actors.jobs.database import Database
from actors.jobs.errors import StoreUnavailable
from actors.jobs.store import JobStore
from actors.jobs.tables import CheckIn
from actors.observe.logs import log_event
from wan_tpu.storage.base import Missing, Storage

log = logging.getLogger(__name__)

_MISSED = 4  # After this many check-ins that couldn't be written, the ingress reports that it isn't ready.


class Presence:
    """What one ingress tells the other processes, and what it knows about them.

    Its methods block on the database: call them in threads.
    """

    def __init__(self, settings: ServiceSettings, database: Database, store: JobStore, storage: Storage) -> None:
        self._limits, self._reliability = settings.limits, settings.reliability
        self._database, self._store, self._storage = database, store, storage
        self.meters = Meters()
        self._name, self._recorded = make_process_name("ingress"), time.monotonic()

    def check_in(self) -> None:
        """Record that this process is there, with its metrics."""
        check_in(self._database, self._make_check_in())
        self._recorded = time.monotonic()

    def read_metrics(self) -> bytes:
        """Return the metrics of all processes in Prometheus's text format."""
        mine = self._make_check_in()
        try:
            present = list_check_ins(self._database, self._reliability.absent_s)
            counts, waiting = self._store.count_jobs(), deliveries.count_waiting(self._database)
        except StoreUnavailable as error:  # This process still has its own metrics.
            log_event(log, "database", logging.WARNING, reason=str(error))
            return generate_latest(self.meters.registry)
        others = [other for other in present if other.name != mine.name]
        return generate_latest(ServiceMetrics([*others, mine], counts, waiting))

    def count_workers(self) -> int:
        """Return the number of workers; raises if database or storage can't be read or written."""
        with contextlib.suppress(Missing):  # Any answer shows that the storage can be reached.
            self._storage.size("ready")
        self._limits.check_disk(self._storage)
        longest_s = _MISSED * self._reliability.check_in_s
        if time.monotonic() - self._recorded > longest_s:
            raise StoreUnavailable(f"{self._database} has accepted no writes for {longest_s:g} s")
        present = list_check_ins(self._database, self._reliability.absent_s)
        return [process.kind for process in present].count("worker")

    def _make_check_in(self) -> CheckIn:
        return CheckIn(name=self._name, kind="ingress", metrics=self.meters.format_text())
