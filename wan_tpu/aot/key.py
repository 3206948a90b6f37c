"""Everything that a compiled program depends on: a stored one is used only if all of this is the same."""

import dataclasses
import functools
import hashlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from wan_tpu.runtime.mesh import describe_sharding
from wan_tpu.switches import read_switches
from wan_tpu.versions import installed_version

PACKAGES = ("jax", "jaxlib", "libtpu", "torch", "torchax", "diffusers", "transformers")
SOURCES = ("wan_tpu", "wan_tpu_kernels")
# These folders decide how programs are compiled, stored and requested, not what they compute.
_NO_PROGRAMS = ("aot", "pricing", "commands", "storage")
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
OPTIONS = ("jax_enable_x64", "jax_default_prng_impl", "jax_numpy_dtype_promotion", "jax_debug_nans")

Ingredients = Mapping[str, str]


def describe_program(name: str, args: Any, mesh: Mesh, settings: str) -> dict[str, str]:
    """Describe a program: its name, its arguments' shapes and shardings, its devices, its model.

    Args:
        args: The positional arguments: arrays, or shapes with shardings.
        settings: Everything else that the traced function closes over, such as the model's configuration.
    """
    leaves, tree = jax.tree.flatten(args)
    shapes = [(tuple(leaf.shape), str(leaf.dtype), describe_sharding(leaf.sharding)) for leaf in leaves]
    devices = [device.id for device in mesh.devices.flat]
    return {
        "program": name,
        "arguments": digest(repr((str(tree), shapes))),
        "mesh": repr(dict(mesh.shape)),
        "devices": f"{mesh.devices.flat[0].platform} {mesh.devices.flat[0].device_kind} {devices}",
        "settings": digest(settings),
    }


def describe_build() -> dict[str, str]:
    """Describe the environment that compiles programs here: sources, versions, flags."""
    versions = {package: installed_version(package) for package in PACKAGES}
    flags = {name: " ".join(os.environ.get(name, "").split()) for name in ENVIRONMENT}
    options = {name: str(getattr(jax.config, name)) for name in OPTIONS}
    return {"source": source_digest(), **versions, **flags, **read_switches(), **options}


@functools.cache
def source_digest(packages: tuple[str, ...] = SOURCES) -> str:
    """Return a digest of the code that programs are traced from, or of some of its packages."""
    checksum = hashlib.sha256()
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        folder = Path(spec.origin).parent
        for file in sorted(folder.rglob("*.py")):
            name = file.relative_to(folder)
            if name.parts[0] not in _NO_PROGRAMS:
                checksum.update(f"{package}/{name}\0".encode() + file.read_bytes())
    return checksum.hexdigest()[:32]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def list_differences(stored: Ingredients, expected: Ingredients) -> list[str]:
    """List the differences between two sets of ingredients, in words for people."""
    return [
        f"{name} is {expected.get(name) or 'absent'}, was {stored.get(name) or 'absent'}"
        for name in sorted({*stored, *expected})
        if stored.get(name, "") != expected.get(name, "")
    ]


def settings(config: Any, dtype: str) -> str:
    """Return the settings that a model's programs are traced with, as text: stored programs depend on them.

    A field of a configuration that no program is traced with has {"traced": False} as its metadata.
    """
    names = [field.name for field in dataclasses.fields(config) if field.metadata.get("traced", True)]
    fields = dataclasses.asdict(config)
    return f"{dtype} {_sort({name: fields[name] for name in names})}"


def _sort(config: Any) -> Any:
    """Sort a configuration, and drop the fields about its origin (_name_or_path, _diffusers_version, ...)."""
    if not isinstance(config, dict):
        return config
    return {name: _sort(config[name]) for name in sorted(config) if not name.startswith("_")}
