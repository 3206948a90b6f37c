"""README and docs: what they name is there."""

import ast
import functools
import re
from pathlib import Path

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


FILE = re.compile(r"`([\w./<>*-]+\.(?:py|pyi|ya?ml|jsonl?|tf|html|toml|sh))`")
NAMES = re.compile(r"(?:[ ,]+`[A-Za-z_][\w.]*`)*")
FOR_CONTRIBUTORS = ("design.md", "kernels.md", "CONTRIBUTING.md", "adding-a-model.md", "adding-a-kernel.md")
SOURCES = ("actors", "cluster", "kernels", "wan_tpu", "scripts", "tests", "examples", "docs")


@functools.cache
def list_files() -> dict[str, list[Path]]:
    """Return the project's files by their names."""
    files: dict[str, list[Path]] = {}
    for path in (*ROOT.iterdir(), *(path for folder in SOURCES for path in (ROOT / folder).rglob("*.*"))):
        files.setdefault(path.name, []).append(path)
    return files


@functools.cache
def list_names(file: Path) -> set[str]:
    """Return the classes, functions, attributes and constants that a Python file defines."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def find_wrong_mentions(text: str):
    """Yield the files that a page names and that aren't there, and the names beside them that a file doesn't define.

    A file without its folder is in that of the file before it, or it is the only one of that name. Names follow their
    file: "`spec.py` `ModelSpec.plan`, `ModelSpec`".
    """
    folder = ROOT
    for mention in FILE.finditer(text):
        name = mention[1]
        if re.search(r"[<>*]", name):  # A pattern.
            continue
        near = [place / name for place in (ROOT, folder, *folder.parents, ROOT / "wan_tpu", ROOT / "kernels")]
        candidates = [path for path in near if path.is_file()] or [
            path for path in list_files().get(Path(name).name, []) if path.as_posix().endswith(f"/{name}")
        ]
        if not candidates:
            yield name
            continue
        folder = candidates[0].parent
        defined = set().union(*(list_names(path) for path in candidates if path.suffix == ".py"))
        for named in re.findall(r"`([\w.]+)`", NAMES.match(text, mention.end())[0]) if defined else ():
            if "." not in named or named.rpartition(".")[2] not in ("py", "yaml", "md", "json"):
                yield from (f"{name} {named}" for part in named.strip(".").split(".") if part not in defined)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_the_names_beside_them_are_there(page):
    """Other pages than contributors' also name files of other projects, and files that commands write."""
    wrong = list(find_wrong_mentions(prose(page)))
    if page.name not in FOR_CONTRIBUTORS:
        wrong = [mention for mention in wrong if mention.split("/")[0] in SOURCES or " " in mention]
    assert page.name == "CHANGELOG.md" or wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_targets_of_make_that_pages_name_are_there(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:`|^)make ([a-z][\w-]*)", page.read_text(), re.MULTILINE)
    assert page.name == "CHANGELOG.md" or set(named) <= targets


def test_page_of_benchmarks_is_the_one_that_its_figures_make():
    assert (ROOT / "docs" / "benchmarks.md").read_text() == as_page(read_benchmarks())
