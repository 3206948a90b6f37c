"""The engine that makes videos for batches and the service: a pipeline on a cluster, or one process."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from actors.observe.span import Span
from wan_tpu.plan import RequestPlan
from wan_tpu.spec import ModelSpec

log = logging.getLogger(__name__)

T = TypeVar("T")
OnEvent = Callable[[Span], object]


@dataclass(frozen=True)
class Fragment:
    """A part of a video's fragmented mp4, sent while later frames are decoded. All parts in order form one file."""

    # The number of this decoding of the video. A decoder that starts again after a loss begins a new run, whose
    # fragments are numbered from 0 again.
    run: int
    index: int  # The fragment's number within its run. Fragment 0 begins with the file's header.
    content: bytes


OnFragment = Callable[[Fragment], object]


@dataclass(frozen=True)
class PreviewPicture:
    """A picture of a video that is being denoised."""

    step: int
    jpeg: bytes


OnPreview = Callable[[PreviewPicture], object]


@dataclass(frozen=True)
class GeneratedVideo:
    """A finished video."""

    mp4: bytes
    warnings: tuple[str, ...] = ()  # What the user should know, such as that a prompt was cut.
    # The last frame before compression, uint8 [H, W, 3], or None if the engine doesn't have it.
    last_frame: np.ndarray | None = field(default=None, compare=False, repr=False)
    frames: int | None = field(default=None, compare=False)  # Its length, if the engine has chosen it.
    # Its end, as `wan_tpu.tail.Tail.dump` returns it, if the request keeps it.
    tail: bytes | None = field(default=None, compare=False, repr=False)


def call_back(callback: Callable[[T], object] | None, value: T, id: str) -> None:
    """Pass a value to a request's callback, if it has one. Errors of the callback don't stop the request."""
    try:
        if callback is not None:
            callback(value)
    except Exception:
        log.exception("%s: the callback that takes a %s has failed", id, type(value).__name__)


class Engine(Protocol):
    """Makes one video per call, and serves several calls at a time."""

    # Plans each request once, when it is admitted. `model.plan(request)` rejects requests that can't be met.
    model: ModelSpec

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
        """Make the video that a plan describes, and return it.

        The engine keeps whatever it needs to resume the request until `forget` is called.

        Args:
            on_event: Called with spans as they end, from any thread.
            on_fragment: Called with each fragment of the video while it is decoded, in order and from any thread. The
                last call is made before this returns. It must not block. None if nobody is watching.
            on_preview: Called with pictures of the unfinished video, from any thread; after a loss, perhaps again with
                one of an earlier step. It must not block. None to have none made. Engines may make none.
        """

    async def forget(self, id: str) -> None:
        """Delete what was kept to resume a request, once its video or failure has been stored durably. Never raises."""
