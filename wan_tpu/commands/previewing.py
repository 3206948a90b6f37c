"""The options of `wan-tpu generate` for previews, and the previews of one run."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wan_tpu.commands.parser import OptionGroup, Parser
from wan_tpu.media.video import check_output

if TYPE_CHECKING:
    from wan_tpu.pipeline import Pipeline
    from wan_tpu.stages import LocalExecutor, StepEvent


@dataclass(frozen=True)
class PreviewOptions:
    """What is done with previews.

    Attributes:
        shown: Whether they are made.
        kept: Whether the last one's file stays when the video is there.
    """

    shown: bool
    kept: bool = False

    def check(self, video: Path, *, overwrite: bool) -> None:
        """Raise `OutputError` if the previews of a video can't be written."""
        if self.shown:
            check_output(get_path(video), overwrite=overwrite)


NO_PREVIEWS = PreviewOptions(shown=False)


def add_preview_arguments(parser: Parser) -> None:
    """Add the options for previews."""
    group = parser.add_group("previews")
    group.add_argument(
        "--previews",
        choices=("auto", "keep", "off"),
        default="auto",
        help="pictures of the unfinished video: auto shows them on a terminal, until the video is there; keep leaves "
        "the last one beside the video; off makes none; default %(default)s",
    )
    add_decoder_argument(group)


def add_decoder_argument(group: OptionGroup) -> None:
    """Add --preview_decoder."""
    group.add_argument(
        "--preview_decoder",
        metavar="FILE",
        help="the model's file of github.com/madebyollin/taehv/safetensors, for previews with details",
    )


def read_options(args: argparse.Namespace) -> PreviewOptions:
    """Return what parsed arguments say about previews."""
    kept = args.previews == "keep"
    return PreviewOptions(kept or (args.previews == "auto" and sys.stdout.isatty()), kept)


def get_path(video: Path) -> Path:
    """Return where the previews of a video go."""
    return video.with_suffix(".preview.png")


@contextlib.contextmanager
def showing_previews(
    pipe: "Pipeline", run: "LocalExecutor", video: Path, options: PreviewOptions
) -> Iterator[Callable[["StepEvent"], object]]:
    """Yield a function to call after each step of a run, which shows the previews that are due.

    When the block ends, the file is removed unless it is to be kept.
    """
    if not options.shown:
        yield lambda event: None
        return
    from wan_tpu.previews.terminal import ShownPreviews
    from wan_tpu.previews.watching import Previews

    shown = ShownPreviews(get_path(video), keep=options.kept)
    with contextlib.closing(shown), contextlib.closing(Previews(pipe.painter)) as previews:
        previews.begin()
        yield lambda event: previews.offer(run.plan, event, run.conditioning.image_latents, shown.show)
