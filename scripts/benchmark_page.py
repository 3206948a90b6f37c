#!/usr/bin/env python3
"""Write docs/benchmarks.md from docs/benchmarks.yaml, which holds every figure with its date, machine and command."""

import datetime
import textwrap
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parents[1] / "docs"
ORIGINS = {"measured", "measured, jobs simulated", "predicted", "emulated", "simulated"}


def main() -> None:
    """Replace the page."""
    (DOCS / "benchmarks.md").write_text(as_page(read_benchmarks()))


def read_benchmarks() -> dict[str, Any]:
    """Return the data as strings, so that 2.60 keeps its zero."""
    return yaml.load((DOCS / "benchmarks.yaml").read_text(), Loader=yaml.BaseLoader)


def as_page(benchmarks: dict[str, Any]) -> str:
    """Return the page in Markdown. Raises `ValueError` for figures that lack a source."""
    parts = [
        "<!-- Written by scripts/benchmark_page.py from benchmarks.yaml: change the figures there. -->",
        "# Benchmarks",
        benchmarks["introduction"],
    ]
    for section in benchmarks["sections"]:
        parts += _as_section(section, benchmarks["machines"], level=2)
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _as_section(section: dict[str, Any], machines: dict[str, str], level: int) -> list[str]:
    parts = ["#" * level + " " + section["title"], *([section["text"]] if "text" in section else [])]
    for figures in section.get("figures", []):
        parts += _as_table(figures, machines)
    for below in section.get("sections", []):
        parts += _as_section(below, machines, level + 1)
    return parts


def _as_table(figures: dict[str, Any], machines: dict[str, str]) -> list[str]:
    columns, rows = figures["columns"], figures["rows"]
    datetime.date.fromisoformat(figures["date"])
    if figures["how"] not in ORIGINS:
        raise ValueError(f"{columns[0]}: how is {figures['how']!r}, not one of {', '.join(sorted(ORIGINS))}")
    if uneven := [row for row in rows if len(row) != len(columns)]:
        raise ValueError(f"{columns[0]}: {len(columns)} columns, but {uneven[0]} has {len(uneven[0])} cells")
    source = f"{figures['how'].capitalize()} {figures['date']}: {machines[figures['machine']]}; `{figures['command']}`"
    lines = [columns, ["---"] * len(columns), *rows]
    return [
        textwrap.fill(source, 150, break_long_words=False, break_on_hyphens=False),
        "\n".join(f"| {' | '.join(line)} |" for line in lines),
        *([figures["notes"]] if "notes" in figures else []),
    ]


if __name__ == "__main__":
    main()
