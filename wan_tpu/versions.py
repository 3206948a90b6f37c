"""The versions of the packages that determine a video's numbers and the speed of its programs."""

import importlib.metadata
import platform

PACKAGES = ("wan-tpu", "jax", "jaxlib", "libtpu", "torch", "torchax", "diffusers", "transformers", "numpy")


def installed_version(package: str) -> str:
    """Return the version of an installed package, empty when it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def list_versions() -> dict[str, str]:
    """Return the versions of Python and of `PACKAGES`, for the record of a video."""
    installed = {name: installed_version(name) or "not installed" for name in PACKAGES}
    return {"python": platform.python_version()} | installed


def summarize_versions() -> str:
    """Return this package's version, and the versions that compiled programs and published figures depend on."""
    versions = list_versions()
    details = ", ".join(f"{name} {versions[name]}" for name in ("python", "jax", "libtpu"))
    return f"{versions['wan-tpu']} ({details})"
