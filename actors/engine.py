"""The engine that makes videos for batches and the service: a pipeline on a cluster, or one process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from actors.observe.span import Span
from wan_tpu.plan import RequestPlan
from wan_tpu.spec import ModelSpec

OnEvent = Callable[[Span], object]


@dataclass(frozen=True)
class Fragment:
    """A part of a video's fragmented mp4, sent while later frames are decoded. All parts in order form one file.

    Attributes:
        run: The number of this decoding of the video. A decoder that starts again after a loss begins a new run, whose
            fragments are numbered from 0 again.
        index: The fragment's number within its run. Fragment 0 begins with the file's header.
        content: The fragment's bytes.
    """

    run: int
    index: int
    content: bytes


OnFragment = Callable[[Fragment], object]


@dataclass(frozen=True)
class PreviewPicture:
    """A picture of a video that is being denoised.

    Attributes:
        step: How many steps were done.
        jpeg: The picture.
    """

    step: int
    jpeg: bytes


OnPreview = Callable[[PreviewPicture], object]


@dataclass(frozen=True)
class GeneratedVideo:
    """A finished video.

    Attributes:
        mp4: The file.
        warnings: What the user should know, such as that a prompt was cut.
        last_frame: The last frame before compression, uint8 [H, W, 3], or None if the engine doesn't have it.
    """

    mp4: bytes
    warnings: tuple[str, ...] = ()
    last_frame: np.ndarray | None = field(default=None, compare=False, repr=False)


class Engine(Protocol):
    """Makes one video per call, and serves several calls at a time.

    Attributes:
        model: Plans each request once, when it is admitted. `model.plan(request)` rejects requests that can't be met.
    """

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
            plan: The request's plan.
            id: The request's name.
            on_event: Called with spans as they end, from any thread.
            priority: Requests of higher priority go first.
            on_fragment: Called with each fragment of the video while it is decoded, in order and from any thread. The
                last call is made before this returns. It must not block. None if nobody is watching.
            on_preview: Called with pictures of the unfinished video, from any thread; after a loss, perhaps again with
                one of an earlier step. It must not block. None to have none made. Engines may make none.
        """

    async def forget(self, id: str) -> None:
        """Delete what was kept to resume a request, once its video or failure has been stored durably. Never raises."""
