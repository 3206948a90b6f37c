"""What `pip install` brings: a core that makes one video, extras for all else, and no other project's names."""

import json
import os
import re
import subprocess
import zipfile

import pytest

from tests.conftest import ROOT
from tests.environments import build_wheel, make_environment

pytestmark = pytest.mark.long

# PyPI has a package of this name. diffusers looks for it by its metadata, transformers also for its version.
OTHERS_KERNELS = {
    "kernels/__init__.py": "def get_kernel(name): ...\n",
    "kernels-0.0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 0.0.1\n",
}
# Imports every module of some packages, except what another extra is for or a database's migrations run.
IMPORT_ALL = """
import importlib, json, pkgutil, sys
packages, without = json.loads(sys.argv[1])
count = 0
for package in packages:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not module.name.startswith((*without, "actors.jobs.migrations", "actors.imported")):
            importlib.import_module(module.name)
            count += 1
print(count)
"""
# Runs commands one after the other, and prints their exit codes.
RUN_ALL = "import json, sys; from actors.cli import main; print([main(argv) for argv in json.loads(sys.argv[1])])"
# Looks for what extras bring and for both packages called kernels, then runs a command as its script does.
LOOK_AND_RUN = """
import importlib.util, runpy, sys
extras = ("alembic", "fastapi", "libtpu", "matplotlib", "ray", "sqlalchemy")
found = [name for name in extras if importlib.util.find_spec(name)]
import kernels, diffusers.utils, transformers.utils, wan_tpu_kernels.flash_attention
print(found, kernels.__file__, diffusers.utils.is_kernels_available(), flush=True)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
NEEDS_AN_EXTRA = [
    (("serve", "--layout", "emulated-demo", "--model", "m"), "serve"),
    (("keys", "list", "--database", "jobs.db"), "serve"),
    (("status",), "cluster"),
    (("plan", "--model", "wan2.1-t2v-1.3b", "--slice", "v6e-1"), "tpu"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def core(wheel, tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("core"), wheel)


def run_python(python, folder, *args):
    """Run an environment's Python in a folder from which nothing of this repository is imported."""
    settings = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    settings |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    return subprocess.run([python, *args], cwd=folder, env=settings, capture_output=True, text=True)


def test_wheel_has_our_packages_and_their_data_only(wheel):
    files = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in files if "dist-info" not in name} == {
        "actors", "cluster", "wan_tpu", "wan_tpu_kernels",
    }  # fmt: skip
    for folder in ("actors", "cluster", "wan_tpu"):
        modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
        assert modules <= set(files)
    assert {"actors/api/http/page.html", "cluster/layouts/four-pools.yaml", "cluster/costs/prices.yaml"} <= set(files)
    assert "cluster/provision/haproxy.cfg" in files


@pytest.mark.thorough
def test_command_without_its_extra_says_which_to_install(core, tmp_path):
    done = run_python(core, tmp_path, "-c", RUN_ALL, json.dumps([command for command, _ in NEEDS_AN_EXTRA]))
    assert (done.returncode, done.stdout) == (0, f"{[2] * len(NEEDS_AN_EXTRA)}\n"), done.stderr
    for (_, extra), line in zip(NEEDS_AN_EXTRA, done.stderr.splitlines(), strict=True):
        assert re.fullmatch(rf"error: .* needs .*: pip install '\.\[{extra}\]'.*", line)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("extra", "packages", "without"),
    [
        (
            "cluster",
            ("cluster", "actors"),
            ("actors.api", "actors.jobs", "actors.commands.keys", "actors.commands.serve"),
        ),
        ("serve", ("actors.api", "actors.jobs", "actors.commands"), ()),
    ],
)
def test_extra_has_what_its_modules_import(wheel, tmp_path, extra, packages, without):
    python = make_environment(tmp_path / "environment", wheel, extra)
    done = run_python(python, tmp_path, "-c", IMPORT_ALL, json.dumps([packages, without]))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


def test_core_makes_a_video_without_any_extra_and_beside_pypis_kernels(core, tmp_path):
    """It comes last, because what it adds stays in that environment."""
    [packages] = core.parent.parent.glob("lib/python*/site-packages")
    for name, content in OTHERS_KERNELS.items():
        (packages / name).parent.mkdir(exist_ok=True)
        (packages / name).write_text(content)
    model, image = (str(ROOT / "examples" / name) for name in ("small-wan2.2-i2v", "ball.png"))
    options = ("--dtype", "float32", "--prompt", "a red ball rolls to the right", "--steps", "2", "--frames", "5")
    command = ("generate", "--model", model, "--image", image, *options, "--output", "ball.mp4")
    done = run_python(core, tmp_path, "-c", LOOK_AND_RUN, core.with_name("wan-tpu"), *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"[] {packages / 'kernels' / '__init__.py'} True"
    assert json.loads((tmp_path / "ball.json").read_text())["request"]["frames"] == 5
    assert (tmp_path / "ball.mp4").stat().st_size > 1000
