"""`wan-tpu status`: what the pipeline of a cluster is doing."""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence

from actors.board import Board
from actors.commands.cluster_arguments import add_cluster_arguments, join
from actors.pools import about, living
from actors.status import PipelineStatus, pipeline_status, text
from cluster.drawing import draw
from cluster.inventory import SliceFound, slices_found
from wan_tpu.commands.parser import Parser

WATCH_S = 1.0


def status(argv: Sequence[str]) -> None:
    """Show pools, slices, queues, requests under way, and how long steps and hand-offs take."""
    parser = Parser(prog="wan-tpu status", description=status.__doc__)
    add_cluster_arguments(parser, 'of the cluster\'s GCS, "host:port"')
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object (a line each with --watch)")
    parser.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")
    args = parser.parse_args(argv)
    address = join(args)
    while True:
        shown = _as_json(args.name) if args.json else f"cluster at {address}\n{_as_text(args.name)}"
        if args.watch and not args.json and sys.stdout.isatty():
            print("\x1b[H\x1b[J", end="")
        print(shown, flush=True)
        if not args.watch:
            return
        time.sleep(WATCH_S)


def _as_text(pipeline: str) -> str:
    slices = slices_found()
    found = _status(pipeline, slices)
    if found is None:
        return f"{draw(slices)}\nno pipeline {pipeline!r} runs here; wan-tpu pipeline up --layout ... --model_id ..."
    return f"{draw(slices)}\n{text(found)}"


def _as_json(pipeline: str) -> str:
    slices = slices_found()
    found = _status(pipeline, slices)
    told = None if found is None else found.to_json()
    return json.dumps({"slices": [_slice(found_) for found_ in slices], "pipeline": told})


def _status(pipeline: str, slices: list[SliceFound]) -> PipelineStatus | None:
    told, board = about(pipeline), Board.find(pipeline)
    if told is None or board is None:
        return None
    return pipeline_status(told, board.seen(), slices, living(pipeline, told.layout))


def _slice(found: SliceFound) -> dict[str, object]:
    return {
        "name": found.name,
        "kind": str(found.spec or found.pod_type),
        "emulated": found.emulated,
        "holder": found.holder,
        "hosts": [dataclasses.asdict(host) for host in found.hosts],
        "missing": list(found.missing),
    }
