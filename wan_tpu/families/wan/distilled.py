"""A Wan checkpoint with replaced experts, as TurboDiffusion publishes them: torch.save files with Wan's own names."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wan_tpu.checkpoint import SETTINGS, Checkpoint, on_disk
from wan_tpu.errors import CheckpointError
from wan_tpu.runtime.torch_files import SUFFIXES, locate_torch_tensors
from wan_tpu.storage.folder import WeightFile

FOLDERS = ("transformer", "transformer_2")
_LINEAR = ".proj_l.weight"  # The end of the name of sparse-linear attention's matrix.
_DENSITY = 0.1  # The attention density of inference/wan2.2_i2v_infer.py in github.com/thu-ml/TurboDiffusion.
_PIPELINE = "WanImageToVideoPipeline"


class WithExperts(Checkpoint):
    """A checkpoint whose experts are read from files; everything else, including their sizes, comes from the base."""

    def __init__(self, base: str | Path, experts: Sequence[str | Path], attention_density: float | None = None) -> None:
        """Check that the experts fit the base.

        Args:
            base: As for `Checkpoint`.
            experts: Files, the high-noise expert's first.
            attention_density: The density of sparse experts (see `WanConfig`); the published one by default.

        Raises:
            CheckpointError: The base can't have these experts.
        """
        super().__init__(base)
        folders = [name for name in FOLDERS if self.has(name)]
        if len(folders) != len(experts):
            raise CheckpointError(
                f"{self.source} has {len(folders)} experts ({', '.join(folders)}), but {len(experts)} files were "
                "given; give one for each expert, the high-noise one first"
            )
        if unread := [str(path) for path in experts if Path(path).suffix not in SUFFIXES]:
            raise CheckpointError(f"{unread[0]} isn't a file of torch.save ({' or '.join(SUFFIXES)})")
        if attention_density is not None and not 0 < attention_density <= 1:
            raise CheckpointError(f"kept_blocks is {attention_density:g}; give a share above 0 and at most 1")
        self._experts = {name: on_disk(Path(path)) for name, path in zip(folders, experts, strict=True)}
        self._changes: dict[str, dict[str, Any]] = {}
        for name, file in self._experts.items():
            names = locate_torch_tensors(file)
            if any(tensor.endswith(".int8_weight") for tensor in names):
                raise CheckpointError(f"{file.address} is quantised; give the file without -quant in its name")
            sparse = any(tensor.endswith(_LINEAR) for tensor in names)
            if attention_density is not None and not sparse:
                raise CheckpointError(f"{file.address} attends to all keys; omit kept_blocks")
            if sparse and self.index.get("_class_name") != _PIPELINE:
                raise CheckpointError(
                    f"{self.source} is a {self.index.get('_class_name')}; sparse experts are supported only for "
                    f"image to video ({_PIPELINE}), because no other model takes the same four steps"
                )
            self._changes[name] = {"attention": "sla", "kept_blocks": attention_density or _DENSITY} if sparse else {}
        files = " and ".join(f"{file.address} ({file.version})" for file in self._experts.values())
        self.source = f"{self.source} with {files}"

    def config(self, component: str, file: str = "config.json") -> dict[str, Any]:
        return super().config(component, file) | self._changes.get(component, {})

    def read_settings(self, *keys: str) -> dict[str, Any]:
        """Return wan_tpu.json, or nothing for sparse experts, whose steps and curves differ from the base's."""
        return {} if any(self._changes.values()) else super().read_settings(*keys)

    def weights(self, component: str, names: Sequence[str] = ("*.safetensors",)) -> dict[str, WeightFile]:
        if component not in self._experts:
            return super().weights(component, names)
        file = self._experts[component]
        return {Path(file.address).name: file}

    def read_small_files(self) -> dict[str, bytes]:
        """Return the contents of all files but weights, by their paths in the checkpoint."""
        contents = super().read_small_files()
        if any(self._changes.values()):
            contents.pop(SETTINGS, None)
        changed = {f"{name}/config.json": self.config(name) for name, changes in self._changes.items() if changes}
        return contents | {name: json.dumps(config, indent=2).encode() for name, config in changed.items()}
