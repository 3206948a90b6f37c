"""README and docs: what they name is there, and they are read without scrolling sideways."""

import re

import pytest

from scripts.benchmark_page import as_page, read_benchmarks
from tests.conftest import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def prose(page):
    return CODE.sub("", page.read_text())


def sections(page):
    """The names that links give to a page's sections, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        file, _, section = target.partition("#")
        target_file = page.parent / file if file else page
        if "://" not in target:
            assert target_file.exists(), target
            assert not section or section in sections(target_file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lines_are_short(page):
    assert [line for line in prose(page).splitlines() if len(line) > 160 and not line.startswith("|")] == []


def test_readme_names_only_targets_that_exist():
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line[:20]}
    readme = (ROOT / "README.md").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in readme
        assert target in targets


def test_page_of_benchmarks_is_the_one_that_its_figures_make():
    assert (ROOT / "docs" / "benchmarks.md").read_text() == as_page(read_benchmarks())


def test_benchmarks_without_a_source_are_refused():
    figures = {"how": "guessed", "date": "2026-11-27", "machine": "m", "command": "c", "columns": ["a"], "rows": []}
    benchmarks = {"introduction": "", "machines": {"m": "two cores"}}
    with pytest.raises(ValueError, match="how is 'guessed'"):
        as_page(benchmarks | {"sections": [{"title": "t", "figures": [figures]}]})
    with pytest.raises(ValueError, match="2 cells"):
        as_page(
            benchmarks
            | {"sections": [{"title": "t", "figures": [figures | {"how": "measured", "rows": [["1", "2"]]}]}]}
        )
