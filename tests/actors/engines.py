"""Engines for tests of the driver alone: real mp4s, no models."""

import asyncio
import functools
import tempfile
from pathlib import Path

import numpy as np

from actors.engine import GeneratedVideo
from tests.actors.small_spec import SPEC
from wan_tpu.data import Video


@functools.cache
def mp4(size=0):
    """A small mp4; padded, as the format allows, to `size` bytes."""
    with tempfile.TemporaryDirectory() as folder:
        pixels = np.linspace(0, 1, 5 * 32 * 48 * 3, dtype=np.float32).reshape(5, 32, 48, 3)
        content = Video(pixels, 8.0).save(Path(folder) / "video.mp4").read_bytes()
    padding = max(size - len(content), 8)
    return content + padding.to_bytes(4, "big") + b"free" + bytes(padding - 8)


class Engine:
    """Waits, then returns an mp4 of the size that the prompt says; counts what is under way.

    The prompt "cut" gives a warning.
    """

    model = SPEC

    def __init__(self, seconds=0.01):
        self.seconds = seconds
        self.under_way = self.most = 0
        self.began = []
        self.forgotten = []

    async def forget(self, id):
        self.forgotten.append(id)

    async def generate(self, plan, *, id, on_event, priority=0, on_fragment=None, on_preview=None):
        request = plan.request
        self.began.append(id)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(self.seconds)
            if request.prompt == "poison":
                raise ValueError("the model\nchoked on it")
            if request.prompt == "cancelled":
                raise asyncio.CancelledError
            if request.prompt == "no mp4":
                return GeneratedVideo(b"GIF89a...")
            if request.prompt == "cut":
                return GeneratedVideo(mp4(), ("the prompt was cut",))
            return GeneratedVideo(mp4(int(request.prompt or 0)))
        finally:
            self.under_way -= 1


class FailingEngine(Engine):
    """Raises the same error for every request."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    async def generate(self, plan, *, id, on_event, priority=0, on_fragment=None, on_preview=None):
        self.began.append(id)
        raise self.error
