"""`wan-tpu models`: the published models, and what each makes when a request gives no settings."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from wan_tpu.commands.parser import Parser
from wan_tpu.commands.tables import as_table
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
    header = ("model", "makes", "size", "frames", "seconds", "steps")
    table = [
        [*(str(model[column]) for column in header), ", ".join(name for name in model["presets"] if name not in _ALL)]
        for model in rows
    ]
    print(as_table((*header, "more presets"), table))
    print(
        "\nThese are the settings of the models' own programs, preset original, which is used without one. Preset\n"
        "diffusers has those of diffusers. --json says where they are from.\n"
        "\nSizes are WIDTHxHEIGHT. All commands take these names and the models' hub ids (--hub_ids lists them);\n"
        "those that make videos also take a diffusers directory, here or in gs://."
    )
    for family in FAMILIES.values():
        if family.licence:
            print(f"\nLicence of {family.title}: {family.licence}.")


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
