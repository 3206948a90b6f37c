"""Adapters on one host: the network lane fetches them, so that the lockstep never waits for the network."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from wan_tpu.errors import Unavailable
from wan_tpu.plan import RequestPlan
from wan_tpu.request import ResolvedRequest
from wan_tpu.requested_adapter import RequestedAdapter
from wan_tpu.runtime.runtime import FetchedAdapter

MAX_WAITING = 64  # The most requests whose adapters are held. No more than this wait for a place on one slice.


T = TypeVar("T")


class FetchedAdapters(Generic[T]):
    """The adapters of requests whose inputs aren't on the devices yet. Any thread may call its methods.

    A request is identified by its plan, because it has no place on the devices yet, and so no key there. Requests with
    equal plans share the adapters that were fetched last.
    """

    def __init__(self, none: T) -> None:
        """Hold nothing; `none` is taken for a request without adapters."""
        self._lock, self._none = threading.Lock(), none
        # Adapters by plan, with the number of requests that will take them.
        self._waiting: OrderedDict[ResolvedRequest, tuple[int, T]] = OrderedDict()

    def put(self, plan: RequestPlan, adapters: T) -> None:
        """Hold a request's adapters, as the `Runtime` returns them, until `take`."""
        key = plan.without_image().request
        with self._lock:
            count, _ = self._waiting.pop(key, (0, self._none))
            self._waiting[key] = count + 1, adapters
            # The oldest belong to cancelled requests, because no other request waits that long.
            while len(self._waiting) > MAX_WAITING:
                self._waiting.popitem(last=False)

    def take(self, plan: RequestPlan) -> T:
        """Return and release a request's adapters; raise `Unavailable` if they are no longer held."""
        if not plan.request.loras:
            return self._none
        key = plan.without_image().request
        with self._lock:
            count, adapters = self._waiting.pop(key, (0, self._none))
            if count > 1:
                self._waiting[key] = count - 1, adapters
        if not count:
            raise Unavailable("the request's adapters aren't on this host any more; fetch_adapters fetches them again")
        return adapters


def check_same_everywhere(adapters: Sequence[RequestedAdapter]) -> None:
    """Check that all hosts of a slice have fetched the same content for a request.

    This is a collective: every process calls it, in the same order as its programs.

    Raises:
        Unavailable: Two hosts have fetched different content; raised on every host.
    """
    if jax.process_count() == 1:
        return
    fetched = [adapter for adapter in adapters if isinstance(adapter, FetchedAdapter)]
    mine = np.frombuffer(hashlib.sha256(" ".join(adapter.checksum for adapter in fetched).encode()).digest(), np.uint8)
    if not (multihost_utils.process_allgather(mine) == mine).all():
        paths = ", ".join(adapter.path for adapter in fetched)
        raise Unavailable(
            f"the hosts of this slice have different content of {paths}; try again when all hosts have the same file"
        )
