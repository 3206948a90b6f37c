"""Meshes of tests on fewer devices than they were written for, as `make test-tpu` may have."""

import math

import jax

Shape = tuple[int, ...]


def fit_mesh(shape: Shape) -> Shape:
    """Return the shape with its first axes halved until there are enough devices: 2x4x2 is 1x2x2 on four."""
    sizes = list(shape)
    while math.prod(sizes) > jax.device_count():
        axis = next(axis for axis, size in enumerate(sizes) if size > 1)
        sizes[axis] //= 2
    return tuple(sizes)


def fit_meshes(*shapes: Shape) -> list[Shape]:
    """Return each of the shapes as it fits, once."""
    return list(dict.fromkeys(map(fit_mesh, shapes)))
