"""README and docs: what they name is there, and they are read without scrolling sideways."""

import re

import pytest

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
        found = page.parent / file if file else page
        if "://" not in target:
            assert found.exists(), target
            assert not section or section in sections(found), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lines_are_short(page):
    assert [line for line in prose(page).splitlines() if len(line) > 160 and not line.startswith("|")] == []


def test_readme_names_only_targets_that_exist():
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line[:20]}
    readme = (ROOT / "README.md").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in readme
        assert target in targets
