"""Fewer and cheaper steps: what four of them, adapters and a cache cost; and mistakes with adapters."""

from dataclasses import replace
from pathlib import Path

from .gate import Sampling

PRESET = "four-steps"


def cheaper(checkpoint: Path) -> dict[str, Sampling]:
    """Return the ways to sample that are compared with the model's own, by what they are called."""
    few = Sampling(steps=None, guidance=None, preset=PRESET)
    files = {side: checkpoint / "adapters" / f"{PRESET}.{side}.safetensors" for side in ("high", "low")}

    def with_(*loras: str, **more: tuple[float, ...]) -> Sampling:
        return Sampling(steps=None, guidance=None, preset=PRESET, loras=loras, **more)  # type: ignore[arg-type]

    right = f"{files['high']}@high", f"{files['low']}@low"
    return {
        "four steps, with the adapter": few,
        "four steps, without": with_(),
        "four steps, with the adapter, and MagCache": replace(few, cache="magcache"),
        "four steps, with the adapter, and MagCache, threshold 0.2": replace(few, cache="magcache:0.2"),
        "MagCache": Sampling(cache="magcache"),
        "MagCache, threshold 0.2, five in a row": Sampling(cache="magcache:0.2,5,0.1"),
        "mistake: each adapter on the other expert": with_(f"{files['high']}@low", f"{files['low']}@high"),
        "mistake: half the scale": with_(*(f"{path}:0.5@{side}" for side, path in files.items())),
        "mistake: three times the scale": with_(*(f"{path}:3@{side}" for side, path in files.items())),
        "mistake: even sigmas": with_(*right, sigmas=(1.0, 0.75, 0.5, 0.25)),
    }
