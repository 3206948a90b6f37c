"""The folders import one way."""

import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from actors.cli import COMMANDS
from tests.conftest import ROOT
from wan_tpu.families import FAMILIES

# Which parts of actors each part may import. A part is a folder right below a package, with all that is in it, or a
# file that lies there alone. Those of wan_tpu, cluster and wan_tpu_kernels are only kept from importing in a circle.
PACKAGES = {
    "cluster": set(),
    "wan_tpu_kernels": set(),
    "wan_tpu": {"wan_tpu_kernels"},
    "actors": {"wan_tpu", "cluster"},
}
FOLDERS = {package: ROOT / package for package in PACKAGES} | {"wan_tpu_kernels": ROOT / "kernels" / "wan_tpu_kernels"}
ACTORS: dict[str, set[str]] = {
    "errors": set(),
    "imported": set(),
    "interrupts": set(),
    "reliability": set(),
    "retrying": set(),
    "pipeline_spec": {"reliability"},
    "observe": {"errors", "pipeline_spec"},
    "engine": {"observe"},
    "slices": {"errors", "observe", "pipeline_spec"},
    "pipeline": {"errors", "engine", "observe", "slices", "pipeline_spec", "reliability", "retrying"},
    "batch": {"errors", "engine", "observe", "interrupts", "pipeline_spec"},
    "jobs": {"errors", "reliability"},
    "planning": set(),
    "doctor": {"planning"},
    "api": {
        "errors", "engine", "observe", "slices", "pipeline", "jobs", "pipeline_spec", "planning", "reliability",
        "retrying",
    },
    "commands": {
        "errors", "engine", "interrupts", "observe", "slices", "pipeline", "batch", "jobs", "api",
        "pipeline_spec", "doctor", "reliability",
    },
    "provision": {"commands"},
    "cli": {"errors", "interrupts", "commands"},
}  # fmt: skip
# Which folders of actors.api each of them may import; all may import the files that lie beside them, but for those
# that start the service's processes.
API: dict[str, set[str]] = {
    "untrusted": set(),
    "outbound": set(),
    "core": {"untrusted", "outbound"},
    "worker": {"outbound"},
    "http": {"core", "untrusted"},
}
FORBIDDEN = {
    "wan_tpu": {"ray"},
    "wan_tpu_kernels": {"ray", "torch", "torchax", "diffusers", "transformers"},
    "cluster": {"torch", "torchax", "diffusers", "transformers"},
    "actors": {"torch", "torchax", "diffusers", "transformers"},
}


@functools.cache
def names(file: Path) -> set[str]:
    """Return what a file imports, anywhere in it, by whole names: a.b.c of `import a.b.c` and `from a.b import c`."""
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    return imported


def imports(file: Path) -> set[str]:
    return {name.split(".")[0] for name in names(file)}


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Return which of our modules import which; a package stands for its __init__.py."""
    files = {}
    for package in PACKAGES:
        for file in FOLDERS[package].rglob("*.py"):
            name = ".".join(file.relative_to(FOLDERS[package].parent).with_suffix("").parts)
            files[name.removesuffix(".__init__")] = file

    def module(name: str) -> str:
        while name and name not in files:
            name = name.rpartition(".")[0]
        return name

    return {name: {module(used) for used in names(file)} - {name, ""} for name, file in files.items()}


def part_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, the first once more at the end; [] where there are none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            if circle := visit(other, [*path, name]):
                return circle
        done.add(name)
        return []

    return next((circle for name in sorted(graph) if (circle := visit(name, []))), [])


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_one_way(package):
    files = list(FOLDERS[package].rglob("*.py"))
    assert files
    for file in files:
        imported = imports(file)
        others = (imported & set(PACKAGES)) - PACKAGES[package] - {package}
        assert not others, f"{file} imports {others}"
        assert not imported & FORBIDDEN.get(package, set()), file


def test_parts_of_actors_import_one_way():
    parts = {part_of(name).removeprefix("actors.") for name in import_graph() if name.startswith("actors.")}
    assert parts == set(ACTORS)
    for name, others in import_graph().items():
        if name.startswith("actors."):
            part = part_of(name).removeprefix("actors.")
            parts = {part_of(other).removeprefix("actors.") for other in others if other.startswith("actors.")}
            assert parts <= ACTORS[part] | {part}, f"{name} imports {sorted(parts - ACTORS[part] - {part})}"


def test_folders_of_the_api_import_one_way():
    for name, others in import_graph().items():
        if name.startswith("actors.api.") and (folder := name.split(".")[2]) in API:
            used = {other.split(".")[2] for other in others if other.startswith("actors.api.")}
            assert used & set(API) <= API[folder] | {folder}, f"{name} imports {sorted(used)}"
            assert not used & {"deploy", "processes"}, f"{name} imports {sorted(used)}"


def test_no_files_import_in_a_circle():
    assert circle(import_graph()) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folders_import_in_a_circle(package):
    parts: dict[str, set[str]] = {}
    for name, others in import_graph().items():
        if name.startswith(f"{package}."):
            mine = {part_of(other) for other in others if other.startswith(f"{package}.")}
            parts.setdefault(part_of(name), set()).update(mine - {part_of(name)})
    assert circle(parts) == []


BUILT_ON = {"helios": "wan"}  # A family whose models are another's with changes imports its modules.


def test_nothing_outside_its_folder_names_a_family():
    """Neither its modules, nor its transformer, nor its models: all is found by what families register."""
    files = {file: file.read_text() for package in PACKAGES for file in FOLDERS[package].rglob("*.py")}
    for family in FAMILIES.values():
        names_of_family = re.compile("|".join(map(re.escape, (family.transformer, family.example, *family.published))))
        for file, text in files.items():
            if (ROOT / "wan_tpu" / "families" / family.name) in file.parents:
                continue
            used = {name for name in names(file) if name.startswith(f"wan_tpu.families.{family.name}")}
            assert not used or BUILT_ON.get(file.parent.name) == family.name, f"{file} imports {used}"
            match = names_of_family.search(text)
            assert not match, f"{file} names {match[0]}"


def list_strings(file: Path) -> list[str]:
    """Return a file's strings, the descriptions of fields included, without the docstrings."""
    tree = ast.parse(file.read_text())
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = (node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node))
    docstrings = {id(node.body[0].value) for node in documented}
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings)
    return [node.value for node in texts if isinstance(node.value, str)]


def test_no_message_names_a_family():
    """What other models can do is asked of the published ones (`wan_tpu.model_limits.name_models`)."""
    titles = re.compile("|".join(re.escape(family.title.split(" and ")[0]) for family in FAMILIES.values()))
    for package in PACKAGES:
        for file in FOLDERS[package].rglob("*.py"):
            # A file in which no title stands is not parsed.
            if ROOT / "wan_tpu" / "families" not in file.parents and titles.search(file.read_text()):
                assert not [text for text in list_strings(file) if titles.search(text)], file


PRIVATE = re.compile(r"(from|import) +(ray[.\w]*\._(private|raylet)|ray\.core\.generated|jax\._src|jaxlib\.(_|mosaic))")


def test_what_is_not_public_in_ray_and_jax_is_used_in_one_file_each():
    """Any version may change it. tests/cluster/test_ray_private.py says why it is used.

    Neither `cluster` nor `wan_tpu` imports the other, so each has a file for JAX.
    """
    files = {file.relative_to(ROOT).as_posix(): file for package in PACKAGES for file in FOLDERS[package].rglob("*.py")}
    users = {name: {match[2] for match in PRIVATE.finditer(file.read_text())} for name, file in files.items()}
    assert {name for name, used in users.items() if any(module.startswith("ray") for module in used)} == {
        "cluster/ray_private.py"
    }
    assert {name for name, used in users.items() if any(module.startswith("jax") for module in used)} == {
        "cluster/gang/host_actor.py",
        "wan_tpu/pricing/jax_private.py",
    }


# Imports once what most commands import, then prints a command's help and all modules in a fork for each.
HELP = """
import contextlib, io, json, os, runpy, sys
import actors.commands.arguments
from actors.cli import main
sys.path.insert(0, "scripts")
for command in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    sys.argv = [command, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        runpy.run_path(command, run_name="__main__") if command.endswith(".py") else main(sys.argv)
    print(json.dumps([command, out.getvalue(), *sys.modules]), flush=True)
    os._exit(0)
"""
COMMANDS_WITH_HELP = (*COMMANDS, "scripts/precompile.py")


@functools.cache
def list_helps() -> dict[str, tuple[str, set[str]]]:
    """Return the help of each command, and the modules that a process has imported when it has printed it."""
    command = [sys.executable, "-c", HELP, *COMMANDS_WITH_HELP]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout
    return {name: (text, set(modules)) for name, text, *modules in map(json.loads, printed.splitlines())}


@pytest.mark.parametrize("command", COMMANDS_WITH_HELP)
def test_help_is_there_at_once(command):
    """Half a second: what takes longer to import is imported once the arguments are read."""
    printed, modules = list_helps()[command]
    assert printed.startswith("usage: ")
    assert not modules & {"diffusers", "fastapi", "jax", "matplotlib", "ray", "sqlalchemy", "torch", "transformers"}


def test_kernels_are_written_in_their_own_package():
    """A model calls `wan_tpu.ops`. The only kernel elsewhere measures a chip's clock."""
    files = [file for file in (ROOT / "wan_tpu").rglob("*.py") if any("pallas" in name for name in names(file))]
    assert [file.relative_to(ROOT / "wan_tpu").as_posix() for file in files] == ["pricing/probe.py"]


def test_torchax_is_imported_in_one_file_only():
    users = [file.name for file in (ROOT / "wan_tpu").rglob("*.py") if "torchax" in imports(file)]
    assert users == ["bridge.py"]


def test_generators_are_closed_where_they_are_left():
    """One that is iterated without a name stays open when the loop is left, until its memory is collected."""
    for file in (ROOT / "actors").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.AsyncFor | ast.comprehension) and getattr(node, "is_async", True):
                assert not isinstance(node.iter, ast.Call), f"{file}: bind {ast.unparse(node.iter)} by aclosing"
