"""A Wan checkpoint with other experts, as TurboDiffusion publishes them: files of torch.save in Wan's own names."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wan_tpu.bucket import WeightFile
from wan_tpu.checkpoint import Checkpoint, on_disk
from wan_tpu.errors import CheckpointError
from wan_tpu.runtime.torch_files import SUFFIXES, torch_tensors

FOLDERS = ("transformer", "transformer_2")
_LINEAR = ".proj_l.weight"  # of sparse-linear attention


class WithExperts(Checkpoint):
    """A checkpoint whose experts are read from files; all else, their sizes too, is the base's."""

    def __init__(self, base: str | Path, experts: Sequence[str | Path], kept_blocks: float) -> None:
        """base: as `Checkpoint` takes it; experts: files, that of high noise first; kept_blocks: see `WanConfig`.

        Raises `CheckpointError` when base can't have these experts.
        """
        super().__init__(base)
        wanted = [name for name in FOLDERS if self.has(name)]
        if len(wanted) != len(experts):
            raise CheckpointError(
                f"{self.source} has {len(wanted)} experts ({', '.join(wanted)}), and {len(experts)} are given; "
                "give a file for each, that of high noise first"
            )
        if unread := [str(path) for path in experts if Path(path).suffix not in SUFFIXES]:
            raise CheckpointError(f"{unread[0]} is no file of torch.save ({' or '.join(SUFFIXES)})")
        if not 0 < kept_blocks <= 1:
            raise CheckpointError(f"{kept_blocks:g} of the blocks can't be kept; give more than 0, and at most 1")
        self._experts = {name: on_disk(Path(path)) for name, path in zip(wanted, experts, strict=True)}
        self._more: dict[str, dict[str, Any]] = {}
        for name, file in self._experts.items():
            names = torch_tensors(file)
            if any(one.endswith(".int8_weight") for one in names):
                raise CheckpointError(f"{file.address} is quantised; give the file without -quant in its name")
            sparse = any(one.endswith(_LINEAR) for one in names)
            self._more[name] = {"attention": "sla", "kept_blocks": kept_blocks} if sparse else {}
        self.source = f"{self.source} with {' and '.join(file.address for file in self._experts.values())}"

    def config(self, component: str, file: str = "config.json") -> dict[str, Any]:
        """Return a component's configuration."""
        return super().config(component, file) | self._more.get(component, {})

    def weights(self, component: str) -> dict[str, WeightFile]:
        """Return a component's files by name."""
        if component not in self._experts:
            return super().weights(component)
        file = self._experts[component]
        return {Path(file.address).name: file}

    def others(self) -> dict[str, bytes]:
        """Return what all files hold but weights, by names from the folder on."""
        found = super().others()
        changed = {f"{name}/config.json": self.config(name) for name, more in self._more.items() if more}
        return found | {name: json.dumps(config, indent=2).encode() for name, config in changed.items()}
