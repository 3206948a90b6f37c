"""Arguments of the commands that carry out a manifest."""

from actors.commands.cluster_arguments import add_pipeline_arguments
from wan_tpu.commands.parser import Parser


def add_drive_arguments(parser: Parser, *, required: bool = True) -> None:
    """What to make, and with what pipeline."""
    add_batch_arguments(parser, in_flight=16, required=required)
    add_pipeline_arguments(parser, "of its own, brought up when none of that name runs on the cluster")
    parser.add_argument("--keep", action="store_true", help="leave the pipeline up that this has brought up")


def add_batch_arguments(parser: Parser, in_flight: int = 2, *, required: bool = True) -> None:
    """What to make, and where it goes."""
    group = parser.add_argument_group("batch")
    group.add_argument("--manifest", required=required, help="one JSON line a request: a path or gs:// (docs/batch.md)")
    group.add_argument("--output", required=required, help="folder or gs://bucket/prefix of videos and results")
    group.add_argument(
        "--in_flight", type=int, default=in_flight, help="requests under way at a time; default %(default)s"
    )
    group.add_argument(
        "--remake_changed", action="store_true", help="make videos again whose line or model has changed since"
    )
    group.add_argument("--timeline", action="store_true", help="write timeline.png and its trace to the output")
