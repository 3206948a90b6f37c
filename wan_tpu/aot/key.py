"""What a compiled program depends on, written down, so that a stored one is used only where it is the same."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

PACKAGES = ("jax", "jaxlib", "libtpu", "torch", "torchax", "diffusers", "transformers")
SOURCES = ("wan_tpu", "kernels")
# These say how programs are compiled, stored and asked for, not what they are.
_NO_PROGRAMS = ("aot", "commands")
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
    flags = {name: os.environ.get(name, "") for name in ENVIRONMENT}
    options = {name: str(getattr(jax.config, name)) for name in OPTIONS}
    return {"source": source_digest(), **versions, **flags, **options}


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


def placed(sharding: Any) -> str:
    """Name how an array lies on the mesh: P("tp") and P("tp", None) are the same, axes of size 1 are none."""
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    sizes = sharding.mesh.shape
    named = [axes if isinstance(axes, tuple) else (axes,) for axes in sharding.spec]
    kept = [tuple(axis for axis in axes if axis is not None and sizes[axis] > 1) for axes in named]
    while kept and not kept[-1]:
        kept.pop()
    return str(kept)


def version(package: str) -> str:
    """Return the version of an installed package, empty when it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
