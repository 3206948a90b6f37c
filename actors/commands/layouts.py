"""`wan-tpu layouts`: list the layouts that come with this package."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster.errors import LayoutError
from cluster.layout import Layout, Pool, list_shipped
from wan_tpu.commands.parser import Parser
from wan_tpu.commands.tables import as_table
from wan_tpu.families import list_published, name_of, published_spec
from wan_tpu.spec import ModelSpec


def layouts(argv: Sequence[str]) -> None:
    """List the shipped layouts: their slices and chips, the models that fit them, and whether they are emulated."""
    parser = Parser(prog="wan-tpu layouts", description=layouts.__doc__)
    parser.add_argument(
        "--model",
        "--model_id",
        type=name_of,
        choices=list_published(),
        metavar="MODEL",
        help="list only the layouts for this model, by its name or hub id: wan-tpu models",
    )
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects, for programs")
    args = parser.parse_args(argv)
    model = None if args.model is None else published_spec(args.model)
    descriptions = [
        _describe(layout) for layout in map(Layout.load, list_shipped()) if model is None or _can_host(layout, model)
    ]
    if args.json:
        print(json.dumps(descriptions))
        return
    header = ("layout", "models with", "chips", "GiB", "emulated", "slices")
    rows = [[str(layout[column]) for column in header[:-1]] + ["; ".join(layout["slices"])] for layout in descriptions]
    print(as_table(header, rows))
    print(
        "\nGiB: usable memory of all chips together.\n"
        "An emulated layout runs on this machine: wan-tpu cluster up --emulate LAYOUT.\n"
        "What a layout's slices make and cost: wan-tpu plan --model MODEL --layout LAYOUT.\n"
        "To write a layout of your own, see docs/cluster.md."
    )


def _can_host(layout: Layout, model: ModelSpec) -> bool:
    try:
        layout.check_stages(tuple(model.components), model.optional_stages)
    except LayoutError:
        return False
    return True


def _describe(layout: Layout) -> dict[str, Any]:
    """Return a layout's values by the table's columns. An emulated layout has "-" for chips and GiB."""
    is_emulated = layout.devices_per_host is not None
    stages = [stage for pool in layout.pools for stage in pool.stages if stage not in ("encoder", "decoder")]
    optional = {stage for name in list_published() for stage in published_spec(name).optional_stages}
    experts = [stage for stage in stages if stage.startswith("denoise") and stage not in optional]
    repeated = "".join(f", {stage}" for stage in stages if stage not in experts)  # Others that denoise.
    return {
        "layout": Path(layout.source).stem,
        "models with": ("one expert" if len(experts) == 1 else f"{len(experts)} experts") + repeated,
        "chips": "-" if is_emulated else _format_sum(layout.pools, lambda pool: pool.slice.chips),
        "GiB": "-"
        if is_emulated
        else _format_sum(layout.pools, lambda pool: pool.slice.chips * pool.slice.chip.usable_gib),
        "emulated": "yes" if is_emulated else "no",
        "slices": [f"{pool.replicas} x {pool.slice}: {', '.join(pool.stages)}" for pool in layout.pools],
    }


def _format_sum(pools: Sequence[Pool], measure: Callable[[Pool], float]) -> str:
    """Return the sum of a measure over all slices, such as "12", or "12 to 48" where pools scale."""
    least, most = (
        sum(getattr(pool.replicas, bound) * measure(pool) for pool in pools) for bound in ("minimum", "maximum")
    )
    return f"{least:.0f}" if least == most else f"{least:.0f} to {most:.0f}"
