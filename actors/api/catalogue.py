"""The adapters that a service offers: by names that its operator gives; clients never name a file."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wan_tpu.errors import InvalidInput, InvalidRequest
from wan_tpu.lora import Lora, lora_of
from wan_tpu.request import Preset
from wan_tpu.spec import ModelSpec

_LONGEST = 80  # characters of a name


@dataclasses.dataclass(frozen=True)
class Catalogue:
    """Adapters by name; several files of one name are applied together, such as one for each expert."""

    adapters: Mapping[str, tuple[Lora, ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, given: Iterable[str]) -> "Catalogue":
        """Read NAME=PATH[:SCALE][@high|low|both], or NAME of a preset, whose adapters `for_model` looks up.

        Raises `InvalidInput`.
        """
        found: dict[str, tuple[Lora, ...]] = {}
        for text in given:
            name, equals, path = text.partition("=")
            if not name or len(name) > _LONGEST or not name.isprintable():
                raise InvalidInput(f"--lora {text[:200]!r} has no name; give NAME=PATH[:SCALE][@high|low|both]")
            found[name] = (*found.get(name, ()), *([lora_of(path)] if equals else []))
        return cls(found)

    def for_model(self, spec: ModelSpec) -> "Catalogue":
        """Return it with the published adapters of presets that were named alone; raises `InvalidInput`."""
        found = {}
        for name, files in self.adapters.items():
            found[name] = files or _of(spec.presets.get(name))
            if not found[name]:
                known = ", ".join(name for name, preset in spec.presets.items() if _of(preset)) or "none"
                raise InvalidInput(
                    f"--lora {name} says no file; the presets of {spec.name} whose adapters are published are {known}"
                )
            for lora in found[name]:
                if not any(lora.is_for(stage) for stage in spec.denoise_stages):
                    raise InvalidInput(f"--lora {name}={lora}: {spec.name} has one expert; leave @{lora.expert} out")
        return Catalogue(found)

    @property
    def files(self) -> tuple[Lora, ...]:
        """All adapters' files."""
        return tuple(lora for loras in self.adapters.values() for lora in loras)

    def loras(self, used: Sequence[Mapping[str, Any]]) -> tuple[Lora, ...]:
        """Return the files of adapters, each {"name", "scale"}; raises `InvalidRequest` for what isn't offered."""
        found = []
        for one in used:
            name, scale = one["name"], one["scale"]
            if name not in self.adapters:
                known = ", ".join(self.adapters) or "none"
                raise InvalidRequest(f"there is no adapter {name[:_LONGEST]!r} here; there are: {known}", "loras")
            found += [dataclasses.replace(lora, scale=lora.scale * scale) for lora in self.adapters[name]]
        return tuple(found)

    def presets(self, spec: ModelSpec) -> dict[str, Preset]:
        """Return the presets of a model that can be used here: those whose adapters there are."""
        return {name: one for name, one in spec.presets.items() if not _of(one) or name in self.adapters}

    def of_preset(self, name: str, spec: ModelSpec) -> list[dict[str, Any]]:
        """Return the adapters that a preset wants, as a request names them; raises `InvalidRequest`."""
        offered = self.presets(spec)
        if name not in offered:
            known = ", ".join(offered) or "none"
            raise InvalidRequest(f"there is no preset {name[:_LONGEST]!r} here; there are: {known}", "preset")
        return [{"name": name, "scale": 1.0}] if _of(offered[name]) else []


def _of(preset: Preset | None) -> tuple[Lora, ...]:
    return () if preset is None else dict(preset.settings).get("loras", ())
