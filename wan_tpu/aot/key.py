"""What a compiled program depends on, written down, so that a stored one is used only where it is the same."""

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

from wan_tpu.runtime.mesh import placed
from wan_tpu.switches import switches
from wan_tpu.versions import version

PACKAGES = ("jax", "jaxlib", "libtpu", "torch", "torchax", "diffusers", "transformers")
SOURCES = ("wan_tpu", "wan_tpu_kernels")
# These say how programs are compiled, stored and asked for, not what they are.
_NO_PROGRAMS = ("aot", "pricing", "commands")
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
OPTIONS = ("jax_enable_x64", "jax_default_prng_impl", "jax_numpy_dtype_promotion", "jax_debug_nans")

Ingredients = Mapping[str, str]


def what(name: str, args: Any, mesh: Mesh, settings: str) -> dict[str, str]:
    """Return what is asked for: a program, its arguments' shapes and shardings, its devices, the model.

    settings  everything else that the traced function closes over, such as the model's configuration
    """
    leaves, tree = jax.tree.flatten(args)
    shapes = [(tuple(leaf.shape), str(leaf.dtype), placed(leaf.sharding)) for leaf in leaves]
    devices = [device.id for device in mesh.devices.flat]
    return {
        "program": name,
        "arguments": digest(repr((str(tree), shapes))),
        "mesh": repr(dict(mesh.shape)),
        "devices": f"{mesh.devices.flat[0].platform} {mesh.devices.flat[0].device_kind} {devices}",
        "settings": digest(settings),
    }


def made_by() -> dict[str, str]:
    """Return what makes a program out of that: sources, versions, flags."""
    versions = {package: version(package) for package in PACKAGES}
    flags = {name: " ".join(os.environ.get(name, "").split()) for name in ENVIRONMENT}
    options = {name: str(getattr(jax.config, name)) for name in OPTIONS}
    return {"source": source_digest(), **versions, **flags, **switches(), **options}


@functools.cache
def source_digest() -> str:
    """Return a digest of the code that programs are traced from."""
    found = hashlib.sha256()
    for package in SOURCES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        folder = Path(spec.origin).parent
        for file in sorted(folder.rglob("*.py")):
            name = file.relative_to(folder)
            if name.parts[0] not in _NO_PROGRAMS:
                found.update(f"{package}/{name}\0".encode() + file.read_bytes())
    return found.hexdigest()[:32]


def digest(text: str) -> str:
    """Return a short name for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def differences(stored: Ingredients, wanted: Ingredients) -> list[str]:
    """Return, for people, what differs between two sets of ingredients."""
    return [
        f"{name} is {wanted.get(name) or 'absent'}, was {stored.get(name) or 'absent'}"
        for name in sorted({*stored, *wanted})
        if stored.get(name, "") != wanted.get(name, "")
    ]


def settings(config: Any, dtype: str) -> str:
    """Return what the programs of a model are traced from beside their arguments: what a stored one depends on.

    A field of a configuration that no program is traced from has {"traced": False} as its metadata.
    """
    traced = [field.name for field in dataclasses.fields(config) if field.metadata.get("traced", True)]
    fields = dataclasses.asdict(config)
    return f"{dtype} {_plain({name: fields[name] for name in traced})}"


def _plain(config: Any) -> Any:
    """Leave out what says where a configuration comes from (_name_or_path, _diffusers_version...); sort the rest."""
    if not isinstance(config, dict):
        return config
    return {name: _plain(config[name]) for name in sorted(config) if not name.startswith("_")}
