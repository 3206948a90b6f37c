"""Names say what they hold, in the field's words: docs/design.md has those that are this project's own."""

import ast
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT

FOLDERS = ("kernels", "wan_tpu", "cluster", "actors", "scripts", "tests")
# Names that would fit anything; a leading underscore doesn't help.
SAY_NOTHING = {"found", "given", "told", "made", "one", "what"}
# What classes and functions were called before they had the field's terms.
FORMER = {
    "Asked", "Doubts", "Front", "Mixed", "Others", "Own", "Seen", "Tools", "Turns", "kept_blocks",
}  # fmt: skip


def named_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield every name that a module gives: to variables, arguments, attributes, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def problems(text: str) -> list[str]:
    return [
        f"line {line}: {name}"
        for line, name in named_in(ast.parse(text))
        if name.strip("_") in SAY_NOTHING or name in FORMER
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_name_would_fit_anything(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    wrong = [f"{file.relative_to(ROOT)}, {problem}" for file in files for problem in problems(file.read_text())]
    assert not wrong, "say what it is:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    ["found = 1", "def _told(): ...", "lambda given: 0", "self._one = 1", "class Doubts: ...", "[0 for made in x]"],
)
def test_name_that_says_nothing_is_noticed(line):
    assert len(problems(line)) == 1
