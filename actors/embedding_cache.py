"""Text embeddings that all replicas share: the same prompt, on the same model, is encoded once.

A small actor keeps them by key, the least recently used leave first. It *owns* the objects: an object dies with its
owner, so the values are put again by the actor (4 to 8 MB, a few milliseconds) and outlive the replica that encoded
them. Brokers hold references only. The cache saves work and never fails a request: without it, callers encode.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import pickle
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError

from cluster.placement import off_hosts

DEFAULT_NAME = "wan-tpu-embeddings"
NAMESPACE = "wan-tpu"  # a fixed one: Serve's replicas and the driver that ends the pipeline have different ones
DEFAULT_CAPACITY_BYTES = 1 << 30  # 250 prompts of UMT5-XXL in bfloat16: 512 tokens x 4096 x 2 bytes each
DEFAULT_LEASE_S = 10.0


@dataclass(frozen=True)
class Embedding:
    """An embedding to use.

    ref     of the value; a task that is given it as an argument finds the value there
    note    the small value that came with it (warnings of the tokenizer)
    cached  false when the caller's own `encode` made it just now
    """

    ref: ray.ObjectRef
    note: Any
    cached: bool


@dataclass(frozen=True)
class CacheStats:
    """Counts since the cache was started.

    hits, misses  of callers; takeovers  how often one that had begun to encode was given up on
    """

    entries: int
    used_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    takeovers: int


def embedding_key(model: str, prompt: str) -> str:
    """Return the key of a prompt.

    model  everything else that decides an embedding's bits: checkpoint, dtype, mesh
    """
    return hashlib.sha256(json.dumps([model, prompt]).encode()).hexdigest()


class EmbeddingCache:
    """A replica's way to the cache; picklable, so that it can be given to actors."""

    def __init__(self, actor: Any, lease_s: float) -> None:
        self._actor = actor
        self._lease_s = lease_s

    @classmethod
    def connect(
        cls,
        name: str = DEFAULT_NAME,
        *,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
        lease_s: float = DEFAULT_LEASE_S,
    ) -> "EmbeddingCache":
        """Return the cache of that name; start it when there is none.

        lease_s    after how long a caller that has begun to encode, and doesn't say that it is alive, is given up on

        The actor outlives who starts it, since replicas come and go: whoever ends the pipeline calls `close`.
        """
        kind = ray.remote(_CacheActor).options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            label_selector=off_hosts(),
            max_restarts=-1,  # when its node dies; empty then
            max_task_retries=0,
            max_concurrency=10_000,  # who waits for somebody else's encoding holds a call
        )
        actor = kind.remote(capacity_bytes, lease_s)
        return cls(actor, lease_s)

    async def get(self, key: str, encode: Callable[[], Awaitable[tuple[Any, ray.ObjectRef]]]) -> Embedding:
        """Return the embedding of `key`; encode it when nobody has it, wait when somebody is at it.

        encode  returns (note, reference of the value); what it raises is raised here, and the next caller encodes
        """
        try:
            lease = await self._actor.claim.remote(key)
        except RayActorError:
            lease = None  # no cache: encode
        if isinstance(lease, Embedding):
            return lease
        if lease is None:
            note, ref = await encode()
            return Embedding(ref, note, cached=False)
        alive = asyncio.create_task(self._renew(key, lease))
        try:
            note, ref = await encode()
            try:
                kept = await self._actor.store.remote(key, lease, note, ref)
            except RayActorError:
                return Embedding(ref, note, cached=False)  # the encoder's own; it lives as long as its owner
            return Embedding(kept.ref, kept.note, cached=False)
        except BaseException:
            self._actor.give_up.remote(key, lease)
            raise
        finally:
            alive.cancel()

    async def forget(self, key: str, embedding: Embedding) -> None:
        """Drop an embedding whose object was found lost, unless it has been replaced; then `get` it again."""
        with contextlib.suppress(RayActorError):
            await self._actor.forget.remote(key, [embedding.ref])  # in a list: else Ray resolves it, and it is lost

    async def stats(self) -> CacheStats:
        """Return counts for people and tests."""
        return await self._actor.stats.remote()

    def close(self) -> None:
        """End the cache, for all who use it; what it holds is lost."""
        ray.kill(self._actor)

    async def _renew(self, key: str, lease: int) -> None:
        """Say that the caller is alive, until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            with contextlib.suppress(RayActorError):
                await self._actor.renew.remote(key, lease)


@dataclass
class _Entry:
    ref: ray.ObjectRef
    note: Any
    size_bytes: int


@dataclass
class _Pending:
    """Somebody encodes; `lease` is theirs until `expires` (of the event loop's clock)."""

    lease: int
    expires: float
    ended: asyncio.Event


class _CacheActor:
    """The one who knows what is there. All methods run in one event loop, so nothing here is locked."""

    def __init__(self, capacity_bytes: int, lease_s: float) -> None:
        self._capacity_bytes, self._lease_s = capacity_bytes, lease_s
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the least recently used first
        self._pending: dict[str, _Pending] = {}
        self._leases = itertools.count(1)
        self._used_bytes = self._hits = self._misses = self._takeovers = 0

    async def claim(self, key: str) -> Embedding | int:
        """Return the embedding, or, for exactly one caller at a time, a lease to encode it."""
        now = asyncio.get_running_loop().time
        while True:
            if key in self._entries:
                self._entries.move_to_end(key)
                self._hits += 1
                return self._embedding(self._entries[key], cached=True)
            pending = self._pending.get(key)
            if pending is None or pending.expires <= now():
                self._takeovers += pending is not None
                self._misses += 1
                lease = next(self._leases)
                self._pending[key] = _Pending(lease, now() + self._lease_s, asyncio.Event())
                return lease
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pending.ended.wait(), pending.expires - now())

    async def renew(self, key: str, lease: int) -> None:
        """Put off the end of a lease, if it is still that caller's."""
        pending = self._pending.get(key)
        if pending is not None and pending.lease == lease:
            pending.expires = asyncio.get_running_loop().time() + self._lease_s

    async def store(self, key: str, lease: int, note: Any, value: Any) -> Embedding:
        """Take over a value, also from one who was given up on; return what all others are given, too."""
        if key not in self._entries:
            size = _size(value)
            entry = _Entry(ray.put(value), note, size)
            if size > self._capacity_bytes:
                self._end(key)
                return self._embedding(entry, cached=False)
            while self._entries and self._used_bytes + size > self._capacity_bytes:
                _, oldest = self._entries.popitem(last=False)
                self._used_bytes -= oldest.size_bytes
            self._entries[key] = entry
            self._used_bytes += size
        self._end(key)
        return self._embedding(self._entries[key], cached=False)

    async def give_up(self, key: str, lease: int) -> None:
        """End a lease whose holder has failed: the next one waiting encodes."""
        if key in self._pending and self._pending[key].lease == lease:
            self._end(key)

    async def forget(self, key: str, lost: list[ray.ObjectRef]) -> None:
        """Drop an entry if it is still the one that was lost."""
        entry = self._entries.get(key)
        if entry is not None and entry.ref in lost:
            del self._entries[key]
            self._used_bytes -= entry.size_bytes

    async def stats(self) -> CacheStats:
        return CacheStats(
            entries=len(self._entries),
            used_bytes=self._used_bytes,
            capacity_bytes=self._capacity_bytes,
            hits=self._hits,
            misses=self._misses,
            takeovers=self._takeovers,
        )

    def _end(self, key: str) -> None:
        pending = self._pending.pop(key, None)
        if pending is not None:
            pending.ended.set()

    @staticmethod
    def _embedding(entry: _Entry, *, cached: bool) -> Embedding:
        return Embedding(entry.ref, entry.note, cached)


def _size(value: Any) -> int:
    """Return about how many bytes a value takes in the object store; arrays are not copied for it."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(pickled) + sum(buffer.raw().nbytes for buffer in buffers)
