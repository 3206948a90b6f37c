"""`wan-tpu drive`: every request of a manifest, through the pipeline of a cluster. What `wan-tpu submit` runs there."""

import argparse
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from actors import batch
from actors.attached import attached, usable
from actors.batch import BatchReport, BatchSettings, run_batch
from actors.board import Board
from actors.commands.batch_arguments import add_drive_arguments
from actors.commands.cluster_arguments import add_cluster_arguments, join, wanted_from
from actors.interrupts import ended_as_by_ctrl_c
from actors.live import Live
from actors.manifest import Manifest, read_manifest
from actors.pipeline import Pipeline
from actors.results import make_plan
from actors.status import under_way
from actors.storage import Storage, open_storage
from actors.timeline import Span
from actors.timeline_picture import save
from wan_tpu.commands.parser import Parser

SNAPSHOTS = ".snapshots"  # in the output, of a pipeline that isn't told another place


def drive(argv: Sequence[str]) -> None:
    """Make every video of a manifest that isn't in the output yet, with the pipeline of a cluster."""
    parser = Parser(prog="wan-tpu drive", description=drive.__doc__)
    add_cluster_arguments(parser, 'of the cluster\'s GCS, "host:port"')
    add_drive_arguments(parser)
    args = parser.parse_args(argv)
    with ended_as_by_ctrl_c(), Live() as live:
        report = _drive(args, live)
    report.check()
    batch.say(report.text())


def _drive(args: argparse.Namespace, live: Live) -> BatchReport:
    manifest = read_manifest(args.manifest)
    output = open_storage(args.output)
    live.tell("joining the cluster")
    wanted = wanted_from(args, join(args), lasting=args.keep, snapshots=_snapshots(args.output))
    found = usable(args.name, wanted)
    settings = (found or wanted).settings  # type: ignore[union-attr]
    how = BatchSettings(in_flight=args.in_flight, remake_changed=args.remake_changed, model=settings.checkpoint)
    spans: list[Span] = []
    with contextlib.ExitStack() as stack:
        engine: batch.Engine = _Nothing()
        if _anything_to_do(manifest, output, how):
            up = stack.enter_context(attached(args.name, wanted, live.tell))
            engine = pipeline = Pipeline(up.layout, up.settings)
            stack.callback(pipeline.close)
            live.look = looking(args.name)
        report = batch.drive(
            run_batch(
                manifest,
                output,
                engine,
                how,
                progress=live,
                on_event=spans.append if args.timeline else None,
                tell=live.line,
            )
        )
        live.tell("")
        live.look = None
    if spans:
        save(output, spans)
    return report


def looking(pipeline: str) -> Callable[[], str]:
    """Return what tells, whenever it is called, where requests are."""
    board = Board.connect(pipeline)
    return lambda: under_way(board.seen())


class _Nothing:
    """The engine of a batch that is done."""

    async def generate(self, *_: object, **__: object) -> bytes:
        raise RuntimeError("nothing was to be done")


def _anything_to_do(manifest: Manifest, output: Storage, settings: BatchSettings) -> bool:
    """Whether a pipeline is needed: bringing one up takes minutes. Raises `StorageError` before that does."""
    output.probe()
    plan = make_plan(output, manifest.entries, model=settings.model, remake_changed=settings.remake_changed)
    return bool(plan.todo)


def _snapshots(output: str) -> str:
    return f"{output.rstrip('/')}/{SNAPSHOTS}" if "://" in output else str(Path(output).absolute() / SNAPSHOTS)
