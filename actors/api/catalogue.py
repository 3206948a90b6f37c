"""The adapters that a service offers, under names that its operator chooses. Clients never name a file."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wan_tpu.errors import InvalidInput, InvalidRequest
from wan_tpu.request import Preset
from wan_tpu.requested_adapter import FORM, RequestedAdapter, parse_adapter
from wan_tpu.spec import ModelSpec

_MAX_NAME = 80  # Characters of a name.


@dataclasses.dataclass(frozen=True)
class Catalogue:
    """Adapters by name."""

    # The files of each name, which are applied together: there may be one for each expert.
    adapters: Mapping[str, tuple[RequestedAdapter, ...]] = dataclasses.field(default_factory=dict)
    own: frozenset[str] = frozenset()  # The names that the checkpoint's presets add.
    # What each file asks for that isn't done, by its path, as far as files have been read.
    warnings: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def parse(cls, arguments: Iterable[str]) -> "Catalogue":
        """Parse the values of --lora; raises `InvalidInput`.

        Args:
            arguments: NAME=PATH, with a path in the `FORM` of adapters, or the NAME of a preset, whose adapters
                `complete_for` looks up.
        """
        adapters: dict[str, tuple[RequestedAdapter, ...]] = {}
        for text in arguments:
            name, equals, path = text.partition("=")
            if not name or len(name) > _MAX_NAME or not name.isprintable():
                raise InvalidInput(f"--lora {text[:200]!r} has no name; give NAME={FORM}")
            adapters[name] = (*adapters.get(name, ()), *([parse_adapter(path)] if equals else []))
        return cls(adapters)

    def complete_for(self, spec: ModelSpec) -> "Catalogue":
        """Return the catalogue with the adapters of presets that are named without a file, or that the checkpoint has.

        Raises:
            InvalidInput: A name without a file isn't such a preset, or a file is for an expert that the model lacks.
        """
        adapters = {}
        own = {name for name, preset in spec.overrides.presets if _get_adapters(preset)} - self.adapters.keys()
        named: dict[str, tuple[RequestedAdapter, ...]] = {**self.adapters, **dict.fromkeys(sorted(own), ())}
        for name, files in named.items():
            adapters[name] = files or _get_adapters(spec.presets.get(name))
            if not adapters[name]:
                known = ", ".join(name for name, preset in spec.presets.items() if _get_adapters(preset)) or "none"
                raise InvalidInput(
                    f"--lora {name} has no file, and isn't a preset of {spec.name} with published adapters; give "
                    f"NAME=PATH, or one of these presets: {known}"
                )
            for file in adapters[name]:
                if not any(map(file.is_for, spec.expert_stages)):
                    raise InvalidInput(
                        f"--lora {name}={file}: {spec.name} has no expert {file.expert!r}; leave @{file.expert} out"
                    )
        return Catalogue(adapters, frozenset(own))

    @property
    def files(self) -> tuple[RequestedAdapter, ...]:
        """The files that the operator names. Those of the checkpoint's presets are part of the checkpoint."""
        return tuple(file for name, files in self.adapters.items() if name not in self.own for file in files)

    def resolve(self, requested: Sequence[Mapping[str, Any]]) -> tuple[RequestedAdapter, ...]:
        """Return the files of the requested adapters, each of which is {"name", "scale"}.

        Raises:
            InvalidRequest: An adapter isn't offered.
        """
        files = []
        for adapter in requested:
            name, scale = adapter["name"], adapter["scale"]
            if name not in self.adapters:
                known = ", ".join(self.adapters) or "none"
                raise InvalidRequest(f"this service has no adapter {name[:_MAX_NAME]!r}; it has: {known}", "loras")
            files += [dataclasses.replace(file, scale=file.scale * scale) for file in self.adapters[name]]
        return tuple(files)

    def list_warnings(self, adapters: Iterable[RequestedAdapter]) -> list[str]:
        """Return what the files of a request's adapters ask for that isn't done."""
        return self.name_files(warning for adapter in adapters for warning in self.warnings.get(adapter.path, ()))

    def name_files(self, warnings: Iterable[str]) -> list[str]:
        """Return warnings for a client, who knows adapters by their names and not by the operator's files."""
        names = {file.path: name for name, files in self.adapters.items() for file in files}
        texts = list(warnings)
        for path in sorted(names, key=len, reverse=True):  # One may begin as another.
            texts = [text.replace(path, names[path]) for text in texts]
        return texts

    def list_presets(self, spec: ModelSpec) -> dict[str, Preset]:
        """Return those presets of a model whose adapters are offered."""
        presets = spec.presets.items()
        return {name: preset for name, preset in presets if name in self.adapters or not _get_adapters(preset)}

    def get_preset_adapters(self, name: str, spec: ModelSpec) -> list[dict[str, Any]]:
        """Return a preset's adapters in the form of a request's; raises `InvalidRequest` if it isn't offered."""
        presets = self.list_presets(spec)
        if name not in presets:
            known = ", ".join(presets) or "none"
            offer = f"; its operator can offer it with --lora {name}" if name in spec.presets else ""
            raise InvalidRequest(f"this service has no preset {name[:_MAX_NAME]!r}; it has: {known}{offer}", "preset")
        return [{"name": name, "scale": 1.0}] if _get_adapters(presets[name]) else []


def _get_adapters(preset: Preset | None) -> tuple[RequestedAdapter, ...]:
    return () if preset is None else dict(preset.settings).get("loras", ())
