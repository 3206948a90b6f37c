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
    """A part of a video's fragmented mp4, sent while later frames are decoded. All parts, in order, are one file.

    Attributes:
        run: Counts the decodings of a video. After a loss the decoder starts again, with the next run's fragment 0.
        index: Counts the fragments of a run. The first one begins with the file's header.
        content: Its bytes.
    """

    run: int
    index: int
    content: bytes


OnFragment = Callable[[Fragment], object]


@dataclass(frozen=True)
class GeneratedVideo:
    """A finished video.

    Attributes:
        mp4: The file.
        warnings: What the user should know, such as that a prompt was cut.
        last_frame: The last frame before it was compressed, uint8 [H, W, 3], where the engine knows it.
    """

    mp4: bytes
    warnings: tuple[str, ...] = ()
    last_frame: np.ndarray | None = field(default=None, compare=False, repr=False)


class Engine(Protocol):
    """Makes one video per call, and serves several calls at a time.

    Attributes:
        model: Plans a request once, when it is let in; `model.plan(request)` refuses requests that can't be made.
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
    ) -> GeneratedVideo:
        """Return the video of a plan.

        Whatever the engine keeps in order to resume the request stays until `forget`.

        Args:
            plan: The request's plan.
            id: The request's name.
            on_event: Called with spans as they end, from any thread.
            priority: The higher goes first.
            on_fragment: Called with each fragment of the video while it is decoded, in order and from any thread; all
                of them before this returns. It must not wait. None where nobody watches.
        """

    async def forget(self, id: str) -> None:
        """Delete whatever is kept to resume a request, whose video or failure is durable by now. Never raises."""
