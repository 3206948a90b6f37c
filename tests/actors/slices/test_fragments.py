"""Fragments between a host and its leader: who waits for whom, and what is left of a video that fails."""

import asyncio
import threading
import time

import numpy as np
import pytest

from actors.errors import StageFailed, StageInterrupted
from actors.slices import fragments
from actors.slices.fragments import FragmentQueues, FragmentTaker, run_concurrently
from actors.slices.messages import EncodedFragment
from cluster.gang.slice import Returned
from wan_tpu.media.mp4 import Mp4


def take_all(queues, key):
    """Yield the fragments that each call takes, until no more can follow."""
    may_follow = True
    while may_follow:
        fragments, may_follow = queues.take(key)
        yield fragments


def encode(on_fragment):
    planes = np.random.default_rng(0).integers(0, 255, (80, 3, 48, 64), np.uint8)
    with Mp4(16, on_fragment) as video:
        for start in range(0, 80, 4):
            video.add(planes[start : start + 4])
        video.finish()
    assert video.failure is None
    return video.content


def test_absent_reader_delays_no_encoder():
    queues = FragmentQueues()
    queues.open("a")
    with queues.fill("a") as on_fragment:
        video = encode(on_fragment)
    with queues.fill("b") as on_fragment:
        assert on_fragment is None  # Nobody asked for them.
    assert queues.list_keys() == ["a"]
    [every] = take_all(queues, "a")
    assert len(every) == 5
    assert len(b"".join(every)) < len(video) + 5000  # What waits is as large as the file.
    assert queues.list_keys() == []
    assert list(take_all(queues, "a")) == [[]]


def test_reader_has_a_fragment_as_soon_as_it_is_there():
    queues, came = FragmentQueues(), []
    queues.open("a")
    reader = threading.Thread(target=lambda: came.extend(take_all(queues, "a")))
    with queues.fill("a") as on_fragment:
        reader.start()
        for content in (b"0", b"1"):
            on_fragment(content)
            until = time.monotonic() + 20
            while [content] not in came and time.monotonic() < until:
                time.sleep(0.001)
            assert came[-1] == [content]
    reader.join()
    assert came == [[b"0"], [b"1"], []]


def test_reader_of_a_slow_video_hears_that_others_may_follow(monkeypatch):
    monkeypatch.setattr(fragments, "WAIT_S", 0.01)
    queues = FragmentQueues()
    queues.open("a")
    assert queues.take("a") == ([], True)
    queues.drop("a")
    assert queues.take("a") == ([], False)


def test_failed_video_ends_its_fragments():
    queues = FragmentQueues()
    queues.open("a")
    with pytest.raises(ValueError, match="no memory"), queues.fill("a") as on_fragment:
        on_fragment(b"0")
        raise ValueError("no memory")
    assert list(take_all(queues, "a")) == [[b"0"]]


class Hosts:
    """Answers calls for fragments from a list; an exception in it is raised."""

    def __init__(self, *answers):
        self.answers = list(answers)

    async def call(self, method, key, lane):
        assert (method, key, lane) == ("take_fragments", "cat 1", "stream")
        await asyncio.sleep(0.001)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Returned(answer, None)


async def read(hosts, decode):
    """Return the fragments of a video that `decode` makes, and what that returns."""
    taker, fragments = FragmentTaker(hosts, "cat 1"), []
    async with run_concurrently(decode(taker.has_begun)) as decoding:
        while some := await taker.take(decoding):
            fragments += some
        return fragments, await decoding


async def decode_at_once(on_begin):
    on_begin.set()
    return "video"


def test_all_fragments_of_a_video_are_taken_though_it_is_decoded():
    hosts = Hosts(([b"0", b"1"], True), ([], True), ([b"2"], False))
    fragments, video = asyncio.run(read(hosts, decode_at_once))
    assert fragments == [EncodedFragment(0, b"0"), EncodedFragment(1, b"1"), EncodedFragment(2, b"2")]
    assert video == "video"


def test_decoder_that_fails_before_its_turn_is_not_asked_for_fragments():
    async def decode(on_begin):
        raise StageInterrupted("the slice is drained")

    with pytest.raises(StageInterrupted):
        asyncio.run(read(Hosts(), decode))


def test_error_of_the_decoder_counts_not_that_of_its_fragments():
    async def decode(on_begin):
        on_begin.set()
        await asyncio.sleep(0.02)
        raise StageFailed("the chip is broken")

    with pytest.raises(StageFailed, match="the chip is broken"):
        asyncio.run(read(Hosts(StageInterrupted("the slice is gone")), decode))
    with pytest.raises(StageFailed, match="the chip is broken"):
        asyncio.run(read(Hosts(*[([], True)] * 100), decode))


def test_cancelled_reader_waits_for_the_decoder_s_end():
    ended = []

    async def decode(on_begin):
        on_begin.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    async def cancel():
        reading = asyncio.create_task(read(Hosts(*[([], True)] * 1000), decode))
        await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert ended

    asyncio.run(cancel())
