"""The versions of the packages that decide a video's numbers and how fast its programs are."""

import importlib.metadata
import platform

PACKAGES = ("wan-tpu", "jax", "jaxlib", "libtpu", "torch", "torchax", "diffusers", "transformers", "numpy")


def version(package: str) -> str:
    """Return the version of an installed package, empty when it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    """Return the versions of Python and of `PACKAGES`, for the record of a video."""
    return {"python": platform.python_version()} | {name: version(name) or "not installed" for name in PACKAGES}


def summary() -> str:
    """Return this package's version, and those that compiled programs and published figures are of."""
    found = versions()
    return f"{found['wan-tpu']} (" + ", ".join(f"{name} {found[name]}" for name in ("python", "jax", "libtpu")) + ")"
