"""Make previews beside the denoising loop. Nothing waits for them, and their failures only cost pictures."""

import contextlib
import logging
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from PIL import Image

from wan_tpu.plan import RequestPlan
from wan_tpu.previews.painter import Painter
from wan_tpu.stage_machine import Operation, Step
from wan_tpu.stages.denoise import StepEvent
from wan_tpu.stages.local import LocalExecutor

MOST_FAILURES = 3  # After as many failures in a row no more previews are made.

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preview:
    """A picture of a video that is being denoised.

    Attributes:
        step: How many steps are done.
        steps: The request's steps.
        picture: Up to four frames, spread over the video, in two columns; with a tiny decoder, the middle one.
    """

    step: int
    steps: int
    picture: Image.Image


class Previews:
    """Makes previews in a thread of its own, one at a time."""

    def __init__(self, painter: Painter) -> None:
        """Start without a thread."""
        self._painter = painter
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="previews")
        self._work: Future[None] | None = None
        self._failures = 0
        self._showing, self._is_closed = threading.Lock(), False

    def begin(self) -> None:
        """Prepare the painter, so that the first preview doesn't have to wait for that."""
        self._start(self._painter.prepare)

    def offer(
        self,
        plan: RequestPlan,
        event: StepEvent,
        image_latents: np.ndarray | jax.Array | None,
        show: Callable[[Preview], object],
    ) -> None:
        """Make a preview of a step's estimate, if one is due and the one before is done.

        This returns at once. The latents are copied from the devices while the next step runs.

        Args:
            plan: The request's plan.
            event: The step.
            image_latents: As in `Conditioning`, on the devices or on the host.
            show: Called with the preview in another thread.
        """
        if event.step not in plan.preview_steps:
            return

        def make() -> None:
            image = None if image_latents is None else np.asarray(image_latents)
            picture = self._painter.paint(event.clean.to_host(), image, plan.request)
            with self._showing:
                if not self._is_closed:
                    show(Preview(event.step, plan.steps, picture))

        self._start(make)

    def close(self) -> None:
        """Show no further preview; one that is being made is finished in the background."""
        with self._showing:
            self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self, work: Callable[[], None]) -> None:
        if self._failures >= MOST_FAILURES or (self._work is not None and not self._work.done()):
            return
        try:
            self._work = self._thread.submit(self._attempt, work)
        except RuntimeError:  # The interpreter is shutting down, or there is no memory for a thread.
            log.warning("no preview: this process can't start a thread")

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            log.warning("no preview: %s", error or type(error).__name__, exc_info=log.isEnabledFor(logging.DEBUG))


def work_with_previews(
    run: LocalExecutor,
    painter: Painter,
    show: Callable[[Preview], object],
    *kinds: type[Operation],
    stop: int | None = None,
) -> Generator[tuple[Operation, Any]]:
    """Run operations as `LocalExecutor.work` does, and show previews of the video while it is denoised.

    Args:
        run: The executor.
        painter: Paints the previews.
        show: Called with each preview in another thread, and no more once this has ended.
        kinds, stop: As for `LocalExecutor.work`.
    """
    with contextlib.closing(Previews(painter)) as previews:
        previews.begin()
        for operation, result in run.work(*kinds, stop=stop):
            if isinstance(operation, Step):
                previews.offer(run.plan, result, run.conditioning.image_latents, show)
            yield operation, result
