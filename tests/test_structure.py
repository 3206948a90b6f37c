"""The rooms import one way, and the package called kernels doesn't confuse transformers."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Which rooms each room may import.
ALLOWED = {
    "cluster": set(),
    "kernels": set(),
    "wan_tpu": {"kernels"},
    "actors": {"wan_tpu", "cluster"},
}
FORBIDDEN = {
    "wan_tpu": {"ray"},
    "kernels": {"ray", "torch", "torchax", "diffusers", "transformers"},
    "cluster": {"torch", "torchax", "diffusers", "transformers"},
    "actors": {"torch", "torchax", "diffusers", "transformers"},
}


def modules(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def imports(file: Path) -> set[str]:
    return {name.split(".")[0] for name in modules(file)}


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_point_one_way(room):
    files = list((ROOT / room).rglob("*.py"))
    assert files
    for file in files:
        found = imports(file)
        others = (found & set(ALLOWED)) - ALLOWED[room] - {room}
        assert not others, f"{file} imports {others}"
        assert not found & FORBIDDEN.get(room, set()), file


def test_ray_s_private_classes_are_used_in_few_files_only():
    """They may change with any version of Ray, which pyproject.toml therefore pins."""
    users = {
        str(file.relative_to(ROOT))
        for room in ("actors", "cluster")
        for file in (ROOT / room).rglob("*.py")
        if any(name.startswith("ray._private") for name in modules(file))
    }
    assert users == {f"cluster/{name}.py" for name in ("authentication", "connect", "draining", "ray_nodes")}


@pytest.mark.parametrize(
    ("command", "absent"),
    [("generate", {"ray"}), ("cluster", {"torch", "jax", "diffusers"})],
)
def test_a_command_imports_only_what_it_needs(command, absent):
    code = f"import sys; from actors.cli import main; main([{command!r}, '--help'])"
    listing = "import atexit, sys; atexit.register(lambda: print('modules', *sys.modules));"
    done = subprocess.run([sys.executable, "-c", listing + code], capture_output=True, text=True, check=True, cwd=ROOT)
    help_text, _, modules = done.stdout.rpartition("modules ")
    assert "usage: " in help_text
    assert not absent & set(modules.split())


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
