"""Names say what they hold, in the field's words: docs/design.md has those that are this project's own."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT

FOLDERS = ("kernels", "wan_tpu", "cluster", "actors", "scripts", "tests")
PACKAGES = FOLDERS[:4]
# Names that would fit anything; a leading underscore doesn't help.
SAY_NOTHING = {"about", "found", "given", "told", "made", "one", "what"}
# Participles that say what happened to a value, and not what it is.
VAGUE = {
    "asked", "begun", "gone", "handed", "heard", "held", "kept", "listed", "named", "presented", "said", "shown",
    "spelled", "starred", "taken", "troubled", "wanted",
}  # fmt: skip
# Fields that others read: the API's, those of `wan-tpu status --json` and of the doctor's report.
PUBLIC = {
    "wan_tpu/request.py": {"about"},
    "actors/api/http/models.py": {"about"},
    "actors/doctor/examination.py": {"about"},
    "actors/pipeline/status.py": {"wanted"},
}
# A function is a verb: no name of one is a bare participle. These only look like one, or are verbs as well.
VERBS = {"cost", "cut", "embed", "exceed", "feed", "need", "put", "seed", "split", "spread"}
PARTICIPLE = re.compile(
    r"[a-z]+ed|begun|bound|broken|built|chosen|cost|cut|done|drawn|gone|heard|held|hidden|kept|known|left|lost|meant|put|"
    r"seen|sent|shot|shown|spent|split|spread|taken|written"
)
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


def problems(text: str, banned: set[str] = SAY_NOTHING | VAGUE) -> list[str]:
    return [
        f"line {line}: {name}"
        for line, name in named_in(ast.parse(text))
        if name.strip("_") in banned or name in FORMER
    ]


def functions_that_are_no_verbs(text: str) -> list[str]:
    """Return the functions, and fixtures of tests, that are called by a bare participle. Properties are values."""
    return [
        f"line {node.lineno}: {node.name}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (name := node.name.strip("_")) not in VERBS
        and PARTICIPLE.fullmatch(name)
        and "property" not in {ast.unparse(decorator) for decorator in node.decorator_list}
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_name_would_fit_anything(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    wrong = []
    for file in files:
        where = file.relative_to(ROOT).as_posix()
        banned = (SAY_NOTHING | VAGUE) - PUBLIC.get(where, set())
        wrong += [f"{where}, {problem}" for problem in problems(file.read_text(), banned)]
    assert not wrong, "say what it is:\n" + "\n".join(wrong)


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_are_verbs(folder):
    wrong = [
        f"{file.relative_to(ROOT)}, {problem}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for problem in functions_that_are_no_verbs(file.read_text())
    ]
    assert not wrong, "say what it does:\n" + "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_class_of_a_package_has_a_name_of_its_own(package):
    places = defaultdict(list)
    for file in sorted((ROOT / package).rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not {name: where for name, where in places.items() if len(where) > 1}


@pytest.mark.parametrize(
    "line",
    [
        "found = 1",
        "def _told(): ...",
        "lambda given: 0",
        "self._one = 1",
        "class Doubts: ...",
        "[0 for made in x]",
        "with x as said: ...",
        "def test(wanted): ...",
    ],
)
def test_name_that_says_nothing_is_noticed(line):
    assert len(problems(line)) == 1


@pytest.mark.parametrize("text", ["def _kept(): ...", "async def asked(): ...", "class A:\n def described(self): ..."])
def test_function_that_is_no_verb_is_noticed(text):
    assert len(functions_that_are_no_verbs(text)) == 1


def test_property_may_be_a_participle():
    assert not functions_that_are_no_verbs("class A:\n @property\n def unused(self): ...\n def seed(self): ...")
