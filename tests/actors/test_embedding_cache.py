"""The cache on a real Ray, with replicas that are really killed."""

import asyncio
import time

import numpy as np
import pytest
import ray

from actors.embedding_cache import EmbeddingCache, embedding_key
from cluster.connect import connect, leave
from cluster.emulated import EmulatedCluster

MEGABYTE = 1_000_000
LEASE_S = 1.5


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory):
    with EmulatedCluster.start((), folder=tmp_path_factory.mktemp("cluster")) as head:
        connect(head.address)
        yield
        leave()


@pytest.fixture
def cache(local_ray):
    made = EmbeddingCache.connect("cache", capacity_bytes=10 * MEGABYTE, lease_s=LEASE_S)
    yield made
    made.close()
    deadline = time.monotonic() + 10
    while any(actor["name"] == "cache" for actor in ray.util.list_named_actors(all_namespaces=True)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


class _Replica:
    """Encodes prompts into arrays of a megabyte, and counts how often."""

    async def begin(self, cache):
        self.cache = cache
        self.encoded = []

    async def get(self, prompt, seconds=0.0, megabytes=1):
        async def encode():
            self.encoded.append(prompt)
            await asyncio.sleep(seconds)
            if prompt == "poison" and len(self.encoded) == 1:
                raise ValueError("no such words")
            return [f"{prompt} was cut"], ray.put(np.full(megabytes * MEGABYTE, ord(prompt[0]), np.uint8))

        return await self.cache.get(embedding_key("model", prompt), encode)

    async def count(self):
        return len(self.encoded)


@pytest.fixture(scope="module")
def pool(local_ray):
    """Replicas for all tests: a process takes a second to start."""
    made = []
    yield made
    for replica in made:
        ray.kill(replica)


@pytest.fixture
def replicas(cache, pool):
    while len(pool) < 2:
        pool.append(ray.remote(_Replica).options(num_cpus=0).remote())
    ray.get([replica.begin.remote(cache) for replica in pool], timeout=30)
    return pool


def stats(cache):
    return asyncio.run(cache.stats())


def value(embedding):
    return ray.get(embedding.ref, timeout=20)


def counts(*replicas):
    return ray.get([replica.count.remote() for replica in replicas], timeout=20)


def test_keys():
    keys = {embedding_key(*pair) for pair in (("a", "b"), ("ab", ""), ("a", "c"), ("b", "b"), ("b", "a"))}
    assert len(keys) == 5
    assert embedding_key("a", "b") in keys


def test_a_prompt_is_encoded_once(cache, replicas):
    first, second = replicas
    made = ray.get(first.get.remote("a cat"), timeout=30)
    found = ray.get(second.get.remote("a cat"), timeout=30)
    assert (made.cached, found.cached) == (False, True)
    assert made.ref == found.ref
    assert found.note == ["a cat was cut"]
    assert (value(found) == ord("a")).all()
    assert counts(*replicas) == [1, 0]


def test_also_when_all_ask_at_the_same_time(cache, replicas):
    asked = [replica.get.remote("a dog", 0.5) for replica in replicas for _ in range(4)]
    answers = list(ray.get(asked, timeout=30))
    assert sum(counts(*replicas)) == 1
    assert len({embedding.ref for embedding in answers}) == 1
    assert sum(not embedding.cached for embedding in answers) == 1


def test_the_value_outlives_its_encoder(cache, replicas):
    made = ray.get(replicas[0].get.remote("a fox"), timeout=30)
    kill(replicas.pop(0))
    assert (value(made) == ord("a")).all()
    found = ray.get(replicas[0].get.remote("a fox"), timeout=30)
    assert found.cached
    assert (value(found) == ord("a")).all()


def kill(actor):
    """Return when it is dead: until then it may still answer."""
    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):
        while True:
            ray.get(actor.count.remote(), timeout=20)


def test_the_next_encodes_when_the_first_dies(cache, replicas):
    first, second = replicas
    first.get.remote("a bird", 60)
    while counts(first) != [1]:
        time.sleep(0.02)
    waiting = [second.get.remote("a bird") for _ in range(3)]
    kill(replicas.pop(0))
    answers = list(ray.get(waiting, timeout=20))
    assert counts(second) == [1]
    assert len({embedding.ref for embedding in answers}) == 1
    assert stats(cache).takeovers == 1


def test_a_slow_encoder_keeps_its_lease(cache, replicas):
    first, second = replicas
    slow = first.get.remote("slow", 2.5 * LEASE_S)
    while counts(first) != [1]:
        time.sleep(0.02)
    found = ray.get(second.get.remote("slow"), timeout=20)
    assert found.cached
    assert ray.get(slow, timeout=20).ref == found.ref
    assert counts(second) == [0]
    assert stats(cache).takeovers == 0


def test_what_encoding_raises_is_the_first_callers(cache, replicas):
    first, second = replicas
    failing = first.get.remote("poison", 0.5)
    while counts(first) != [1]:
        time.sleep(0.02)
    waiting = second.get.remote("poison")
    with pytest.raises(ValueError, match="no such words"):
        ray.get(failing, timeout=20)
    with pytest.raises(ValueError, match="no such words"):  # its own: this prompt fails the first time on every replica
        ray.get(waiting, timeout=20)
    assert stats(cache).takeovers == 0  # it was given the lease, and hasn't waited for its end
    assert not ray.get(second.get.remote("poison"), timeout=20).cached


def test_the_least_recently_used_leave_first(cache, replicas):
    first, second = replicas
    for prompt in ("a", "b", "c"):
        ray.get(first.get.remote(prompt, 0, 3), timeout=20)
    held = ray.get(first.get.remote("b", 0, 3), timeout=20)
    assert ray.get(first.get.remote("a", 0, 3), timeout=20).cached
    ray.get(first.get.remote("d", 0, 3), timeout=20)  # the fourth of 3 MB in 10 MB: c leaves
    kept = stats(cache)
    assert (kept.entries, kept.used_bytes // MEGABYTE) == (3, 9)
    assert [ray.get(first.get.remote(p, 0, 3), timeout=20).cached for p in ("a", "b", "d", "c")] == [True] * 3 + [False]
    assert (value(held) == ord("b")).all()
    whole = ray.get(second.get.remote("e", 0, 11), timeout=20)  # larger than the cache: handed out, not kept
    assert (value(whole) == ord("e")).all()
    assert stats(cache).entries == 3


def test_a_value_in_use_survives_leaving_the_cache(cache, replicas):
    held = ray.get(replicas[0].get.remote("x", 0, 6), timeout=20)
    ray.get(replicas[0].get.remote("y", 0, 6), timeout=20)
    assert stats(cache).entries == 1
    assert (value(held) == ord("x")).all()


def test_without_the_cache_requests_go_on(cache, replicas):
    """The actor dies with all it owns; the loss is noticed, the restarted one is empty, and fills again."""
    first, second = replicas
    held = ray.get(first.get.remote("a cat"), timeout=20)
    waiting = [first.get.remote("a dog", 1.0), second.get.remote("a dog", 1.0)]
    while sum(counts(*replicas)) < 2:
        time.sleep(0.02)
    ray.kill(cache._actor, no_restart=False)
    for embedding in ray.get(waiting, timeout=30):
        assert (value(embedding) == ord("a")).all()
    with pytest.raises(ray.exceptions.ObjectLostError):
        value(held)
    asyncio.run(cache.forget(embedding_key("model", "a cat"), held))
    again = ray.get(second.get.remote("a cat"), timeout=30)
    assert (value(again) == ord("a")).all()
    found = ray.get(first.get.remote("a cat"), timeout=30)
    assert found.cached


def test_forgetting_drops_only_what_was_lost(cache, replicas):
    key = embedding_key("model", "a cat")
    old = ray.get(replicas[0].get.remote("a cat"), timeout=20)
    asyncio.run(cache.forget(key, old))
    assert stats(cache).used_bytes == 0
    new = ray.get(replicas[0].get.remote("a cat"), timeout=20)
    assert not new.cached
    asyncio.run(cache.forget(key, old))  # somebody else has noticed it late
    assert ray.get(replicas[0].get.remote("a cat"), timeout=20).ref == new.ref
