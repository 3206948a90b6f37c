"""JAX's cache of compiled programs, on by default: a later process loads what an earlier one compiled."""

import logging

import jax

from wan_tpu.storage.folder import cache_folder

_LEAST_S = 0.2  # A program that compiles faster is compiled again. JAX's own second leaves most of a small model out.
_MOST_BYTES = 20 << 30  # A model's programs take tens of MB. Beyond it JAX drops the least recently used ones.
_EVENTS = {"/jax/compilation_cache/cache_hits": "loaded", "/jax/compilation_cache/cache_misses": "compiled"}
_log = logging.getLogger(__name__)
_counts = dict.fromkeys(_EVENTS.values(), 0)


def keep_compiled(location: str | None = None) -> None:
    """Have JAX keep what it compiles, unless it has a place for that already (`JAX_COMPILATION_CACHE_DIR`).

    Args:
        location: A folder, or one in gs://; by default the user's cache folder.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    if location is None:
        folder = cache_folder() / "programs"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _log.warning("compiled programs aren't kept: can't create %s (%s)", folder, error.strerror)
            return
        jax.config.update("jax_compilation_cache_max_size", _MOST_BYTES)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_S)
        location = str(folder)
    jax.config.update("jax_compilation_cache_dir", location)


def count_programs() -> dict[str, int]:
    """Return how many programs this process has loaded instead of compiling, and how many it has compiled and kept."""
    return dict(_counts)


def note_loaded() -> None:
    """Count a program that was loaded from elsewhere."""
    _counts["loaded"] += 1


def _count(event: str, **_: object) -> None:
    if event in _EVENTS:
        _counts[_EVENTS[event]] += 1


jax.monitoring.register_event_listener(_count)
