"""The rooms import one way, and the package called kernels doesn't confuse transformers."""

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Which rooms each room may import; a room that isn't there yet has no files to check.
ALLOWED = {
    "cluster": set(),
    "kernels": set(),
    "wan_tpu": {"kernels"},
    "actors": {"wan_tpu", "cluster"},
}
FORBIDDEN = {"wan_tpu": {"ray"}, "kernels": {"ray", "torch", "torchax", "diffusers", "transformers"}}


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_point_one_way(room):
    for file in (ROOT / room).rglob("*.py"):
        found = imports(file)
        others = (found & set(ALLOWED)) - ALLOWED[room] - {room}
        assert not others, f"{file} imports {others}"
        assert not found & FORBIDDEN.get(room, set()), file


def test_models_never_name_a_kernel():
    for file in (ROOT / "wan_tpu").rglob("*.py"):
        if file.name != "attention.py" and file.parent.name != "aot":  # aot compiles kernels to count them
            assert "pallas" not in file.read_text().lower(), file


def test_our_kernels_are_not_taken_for_the_package_of_that_name():
    """PyPI has a package `kernels`, which these libraries look for and would load attention from."""
    import diffusers.utils
    import transformers.utils

    import kernels

    assert Path(kernels.__file__).is_relative_to(ROOT)
    assert not transformers.utils.is_kernels_available()
    assert not diffusers.utils.is_kernels_available()


def test_torchax_is_imported_in_one_file_only():
    users = [file.name for file in (ROOT / "wan_tpu").rglob("*.py") if "torchax" in imports(file)]
    assert users == ["bridge.py"]


def test_readme_names_only_targets_that_exist():
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line[:20]}
    readme = (ROOT / "README.md").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in readme
        assert target in targets
