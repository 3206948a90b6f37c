"""`wan-tpu models`: the published models, and what each makes when a request gives no settings."""

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from typing import Any

from wan_tpu.commands.parser import Parser
from wan_tpu.commands.tables import WIDTH, as_table
from wan_tpu.families import FAMILIES, list_hub_ids, list_published, published_spec
from wan_tpu.request import DIFFUSERS, ORIGINAL

_ALL = (ORIGINAL, DIFFUSERS)  # Presets that all models have.
_MAKES = {("t2v",): "text to video", ("i2v",): "image to video", ("t2v", "i2v"): "text or image to video"}


def models(argv: Sequence[str]) -> None:
    """List the published models: what they make, their default size, length and steps, and their presets."""
    parser = Parser(prog="wan-tpu models", description=models.__doc__)
    parser.add_argument("--json", action="store_true", help="for programs: a list of JSON objects")
    parser.add_argument("--hub_ids", action="store_true", help="list where the models are on the Hugging Face hub")
    args = parser.parse_args(argv)
    rows = [_describe(name) for name in list_published()]
    if args.json:
        print(json.dumps(rows, ensure_ascii=False))
        return
    if args.hub_ids:
        print(as_table(("model", "hub id"), [[name, hub_id] for name, hub_id in list_hub_ids().items()]))
        return
    columns = ("size", "frames", "seconds", "steps")
    table = []
    for row in rows:
        source, _, sound = row["makes"].partition(" to video")
        table.append([row["model"], source, *(str(row[column]) for column in columns), "yes" if sound else ""])
    print(as_table(("model", "from", *columns, "sound"), table))
    presets = [f"{', '.join(models)}: {', '.join(names)}" for names, models in _group_by_presets(rows).items() if names]
    _print_paragraphs(
        "These are the settings of the models' own programs, preset original, which is used without one. Preset "
        "diffusers has the defaults of diffusers' pipelines. --json says where they are from. More presets:",
        *presets,
        "Sizes are WIDTHxHEIGHT. All commands take these names and the models' hub ids (--hub_ids lists them); those "
        "that make videos also take a diffusers directory, here or in gs://.",
        *(f"Licence of {family.title}: {family.licence}." for family in FAMILIES.values() if family.licence),
    )


def _print_paragraphs(*paragraphs: str) -> None:
    for paragraph in paragraphs:
        print(f"\n{textwrap.fill(paragraph, WIDTH, break_on_hyphens=False, break_long_words=False)}")


def _group_by_presets(rows: list[dict[str, Any]]) -> dict[tuple[str, ...], list[str]]:
    """Return the names of the models that have the same presets of their own, by these presets."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        groups.setdefault(tuple(name for name in row["presets"] if name not in _ALL), []).append(row["model"])
    return groups


def _describe(name: str) -> dict[str, Any]:
    """Return a model's row, by the table's columns."""
    spec = published_spec(name)
    settings = spec.defaults
    makes = "two images to video" if spec.last_images == "required" else _MAKES[spec.tasks]
    return {
        "model": name,
        "hub_id": list_hub_ids().get(name),
        "makes": makes if spec.audio_rate is None else f"{makes} with sound",
        "size": f"{settings.width}x{settings.height}",
        "frames": settings.frames,
        "seconds": round(settings.frames / settings.fps, 1),
        "steps": settings.steps,
        "settings": dataclasses.asdict(settings),
        "presets": {name: {"about": preset.about, "source": preset.source} for name, preset in spec.presets.items()},
        "licence": list_published()[name].licence,
    }
