"""Diffusers checkpoints: the index, configurations and files of a directory or hub id.

Weights are read by `runtime.components`.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from wan_tpu.errors import CheckpointError, InvalidRequest
from wan_tpu.request import CheckpointOverrides, Defaults, GenerationRequest, Preset, fill_second_scale
from wan_tpu.requested_adapter import parse_adapter
from wan_tpu.schedules.magcache import Curve, read_curve
from wan_tpu.sources.disk import explain_disk_error, is_permanent, read_file
from wan_tpu.sources.hub import advise_on_download, explain_hub_errors, explain_missing_index
from wan_tpu.storage.addresses import is_bucket
from wan_tpu.storage.folder import BucketFolder, WeightFile

INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"  # Modular pipelines of diffusers have it instead.
SETTINGS = "wan_tpu.json"
# Every file of a checkpoint that isn't a weight file, in its folder and one level below.
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.md", "*LICENSE*")
# Files one and two levels deep. Some published checkpoints contain further models in nested folders, which are ignored.
_IN_FOLDERS, _DEEPER = "*/*", "*/*/*"


class Checkpoint:
    """A diffusers directory, on disk, in a bucket or on the Hugging Face hub; only JSON and safetensors are read."""

    def __init__(self, source: str | Path) -> None:
        """Open `source`: a folder or bucket with a model_index.json or modular_model_index.json, or a hub id.

        Weights are fetched when they are read.

        Raises:
            CheckpointError: `source` is none of these, or its index is missing or damaged.
            Unavailable: The bucket, the hub or the disk doesn't answer.
        """
        if not isinstance(source, str | Path) or not str(source):
            raise CheckpointError(f"the model is {source!r}; give a diffusers directory, one in gs://, or a hub id")
        self._bucket = BucketFolder(str(source)) if is_bucket(str(source)) else None
        local = Path(source)
        try:
            exists = local.exists()
        except OSError as error:
            raise explain_disk_error(error, local) from None
        # Absolute, so that stage files mean the same from every folder.
        self.source = str(local.resolve()) if exists else str(source)
        self._asked_for = str(source)
        self._hub_id = None if exists or self._bucket else _hub_id(self.source)
        self._local = self._bucket is None and self._hub_id is None
        self.folder = local if self._local else self._fetch(["*.json"], _IN_FOLDERS)
        # Repositories for modular pipelines may have both, with the same content.
        self.index_name = next((name for name in (INDEX, MODULAR_INDEX) if (self.folder / name).is_file()), INDEX)
        self.index = self._json(self.index_name)
        if not self._local:
            parts = [name for name, entry in self.index.items() if isinstance(entry, list) and any(entry)]
            self._fetch([*(f"{name}/*.json" for name in parts), "tokenizer/*"], _DEEPER)

    def has(self, component: str) -> bool:
        """Return whether the index names this component (diffusers writes [null, null] for an absent one).

        An entry of a modular pipeline has a third part, which names the component's folder. It must be the component's
        name.
        """
        entry = self.index.get(component) or [None, None]
        parts = entry if isinstance(entry, list) and len(entry) in (2, 3) else []
        kinds = {type(part) for part in parts[:2]}
        if kinds not in ({str}, {type(None)}):
            raise CheckpointError(
                f"{self.source}/{self.index_name} has {component}: {json.dumps(entry)[:200]}; give the name of a "
                "library and of a class in it, or null twice"
            )
        place = parts[2] if len(parts) == 3 and isinstance(parts[2], dict) else {}
        if (folder := place.get("subfolder", component)) != component:
            raise CheckpointError(
                f"{self.source}/{self.index_name} has {component} in the folder {json.dumps(folder)}; move it to "
                f"{component}/ and name that folder"
            )
        return kinds == {str}

    @property
    def names(self) -> list[str]:
        """Names that may identify the checkpoint: the parts of its address, last one first, then those of its origin.

        A symbolic link's own name comes before that of its target. The origin is recorded in the index, by diffusers
        and by `read_small_files`.
        """
        origin = self.index.get("_name_or_path")
        address = dict.fromkeys([*reversed(self._asked_for.split("/")), *reversed(self.source.split("/"))])
        return [*address, *(reversed(origin.split("/")) if isinstance(origin, str) else ())]

    def class_name(self, component: str) -> str:
        """Return the name of a component's class in the index."""
        return self.index[component][1]

    def config(self, component: str, file: str = "config.json") -> dict[str, Any]:
        return self._json(f"{component}/{file}")

    def read_settings(self, *keys: str) -> dict[str, Any]:
        """Return the content of wan_tpu.json, an optional file beside the model's index; {} if there is none.

        Args:
            keys: Keys that the model's family accepts in addition to those of `sampling`.

        Raises:
            CheckpointError: The file has unknown keys, or is damaged.
        """
        content = self._json(SETTINGS) if (self.folder / SETTINGS).is_file() else {}
        allowed = ("defaults", "presets", "magcache", *keys)
        if unknown := sorted(set(content) - set(allowed)):
            raise CheckpointError(
                f"{self.folder / SETTINGS} says {', '.join(unknown)}; this model has only {', '.join(allowed)}"
            )
        return content

    def sampling(self, *keys: str) -> CheckpointOverrides:
        """Return the defaults, presets and curves in wan_tpu.json.

        `{"defaults": {"height": 64, ...}, "presets": {"fast": {"about": "...", "source": "https://...", "settings":
        {"sigmas": [1, 0.8], "loras": ["./adapters/a.safetensors@high"], ...}}}}`, by the names of `wan_tpu.request`.
        Adapters' paths that begin with ./ are relative to the checkpoint.

        Args:
            keys: As in `read_settings`.

        Raises:
            CheckpointError: Something in it is unknown, or out of range.
        """
        content = self.read_settings(*keys)
        allowed = [field.name for field in dataclasses.fields(Defaults)]
        defaults = fill_second_scale(self._settings("defaults", content.get("defaults", {}), allowed))
        presets: dict[str, Preset] = {}
        for name, entry in dict(content.get("presets", {})).items():
            where = f"presets {name}"
            if not isinstance(entry, dict) or set(entry) != {"about", "source", "settings"}:
                raise CheckpointError(
                    f"{self.folder / SETTINGS}: {where} must have the keys about, source and settings, and no others"
                )
            fields = entry["settings"]
            if isinstance(fields, dict) and isinstance(fields.get("loras"), list):
                fields = fields | {"loras": [self._resolve_path(adapter) for adapter in fields["loras"]]}
            settings = self._settings(where, fields, [*allowed, "sigmas", "switch_step", "loras"])
            presets[name] = Preset(str(entry["about"]), str(entry["source"]), tuple(settings.items()))
        return CheckpointOverrides(
            tuple(defaults.items()), tuple(presets.items()), self._curves(content.get("magcache", []))
        )

    def _curves(self, curves: Any) -> tuple[Curve, ...]:
        """Read MagCache's curves, as `wan-tpu calibrate` writes them; raises `CheckpointError`."""
        try:
            return tuple(read_curve(curve) for curve in curves)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder / SETTINGS}: in magcache, a list of curves, {error!r}; "
                "remove it, and measure it again with wan-tpu calibrate"
            ) from None

    def _settings(self, where: str, fields: Any, allowed: Sequence[str]) -> dict[str, Any]:
        """Validate fields as those of a request and drop the null ones; raises `CheckpointError` naming `where`."""
        try:
            if unknown := sorted(set(fields) - set(allowed)):
                raise InvalidRequest(f"there is no setting {', '.join(unknown)}; allowed: {', '.join(allowed)}")
            request = GenerationRequest(**fields)
        except (InvalidRequest, TypeError) as error:
            raise CheckpointError(f"{self.folder / SETTINGS}: in {where}, {error}") from None
        return {name: getattr(request, name) for name in fields if getattr(request, name) is not None}

    def _resolve_path(self, adapter: Any) -> Any:
        """Return an adapter's text or fields with the "./" of its path replaced by the checkpoint's address."""
        if isinstance(adapter, dict) and isinstance(adapter.get("path"), str):
            return adapter | {"path": self._resolve_path(adapter["path"])}
        if isinstance(adapter, str) and adapter.startswith("./"):
            return f"{self.source}/{adapter.removeprefix('./')}"
        return adapter

    def path(self, component: str) -> Path:
        """Return a component's folder on disk, without its weights; fetch it if it is missing."""
        if not self._local:
            self._fetch([f"{component}/*.json"])
        return self.folder / component

    def weights(self, component: str, names: Sequence[str] = ("*.safetensors",)) -> dict[str, WeightFile]:
        """Return a component's safetensors files by name. Those of the hub are fetched, a bucket's are read in place.

        Args:
            names: Patterns of the files to fetch. Other files that are already there are returned, too.

        Raises:
            CheckpointError: There is no such checkpoint.
            Unavailable: The bucket, the hub or the disk doesn't answer.
        """
        if self._bucket is not None:
            files = self._bucket.files(component)
            return {name: file for name, file in files.items() if name.endswith(".safetensors")}
        if not self._local:
            self._fetch([f"{component}/{name}".lstrip("/") for name in names])
        return {file.name: on_disk(file) for file in (self.folder / component).glob("*.safetensors")}

    def adapters(self, settings: Mapping[str, Any]) -> dict[str, WeightFile]:
        """Return the adapters in this folder that presets use, by their paths relative to it.

        Args:
            settings: The content of wan_tpu.json, as `sampling` accepts it.

        Raises:
            CheckpointError: One of them isn't there.
            Unavailable: The bucket, the hub or the disk doesn't answer.
        """
        beside: dict[str, WeightFile] = {}
        for preset, entry in settings.get("presets", {}).items():
            for adapter in map(self._resolve_path, entry["settings"].get("loras") or []):
                path = parse_adapter(adapter).path
                if not path.startswith(f"{self.source}/"):
                    continue
                name = path.removeprefix(f"{self.source}/")
                folder = name.rpartition("/")[0] if name.endswith(".safetensors") else name.rstrip("/")
                files = {f"{folder}/{file}".lstrip("/"): weights for file, weights in self.weights(folder).items()}
                files = {file: weights for file, weights in files.items() if name in (file, folder)}
                if not files:
                    raise CheckpointError(
                        f"{self.folder / SETTINGS}: preset {preset} has the adapter ./{name}, "
                        "which doesn't exist; fetch the checkpoint again"
                    )
                beside |= files
        return beside

    def read_small_files(self) -> dict[str, bytes]:
        """Return the content of all files but weights, by their paths relative to the folder; fetch missing ones.

        The index names their origin, since a copy's own name may not say which model it is (`names`).
        """
        if not self._local:
            self._fetch(SMALL_FILES)
        files = {file for pattern in SMALL_FILES for file in self.folder.rglob(pattern.rpartition("/")[2])}
        files = {file for file in files if file.is_file() and ".safetensors." not in file.name}
        contents = {str(file.relative_to(self.folder)): read_file(file) for file in sorted(files)}
        if "_name_or_path" not in self.index:
            index = {"_name_or_path": self.source} | json.loads(contents[self.index_name])
            contents[self.index_name] = json.dumps(index, indent=2).encode()
        return contents

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads((self.folder / name).read_text())
        except OSError as error:
            if not is_permanent(error):
                raise explain_disk_error(error, self.folder / name) from None
            if name == INDEX:
                raise explain_missing_index(self.source, self.folder, is_hub=self._hub_id is not None) from None
            advice = advise_on_download(self.folder) or "fetch the checkpoint again"
            raise CheckpointError(f"{self.source} has no {name}, which its {self.index_name} lists; {advice}") from None
        except ValueError as error:
            raise CheckpointError(f"{self.folder / name} isn't valid JSON ({error}); fetch it again") from None
        if not isinstance(content, dict):
            raise CheckpointError(f"{self.folder / name} isn't a JSON object; fetch it again")
        return content

    def _fetch(self, patterns: Sequence[str], ignored: str | None = None) -> Path:
        """Fetch the files that match one of the patterns but not `ignored`; return the folder."""
        if self._bucket is not None:
            return self._bucket.fetch(patterns, ignored)
        with explain_hub_errors(str(self._hub_id)):
            folder = huggingface_hub.snapshot_download(
                str(self._hub_id), allow_patterns=list(patterns), ignore_patterns=ignored
            )
            return Path(folder)


def on_disk(path: Path) -> WeightFile:
    """Return a file of weights on this machine; raises `CheckpointError` when it isn't there, or `Unavailable`."""

    def read(start: int, stop: int) -> bytes:
        try:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(stop - start)
        except OSError as error:
            raise explain_disk_error(error, path) from None

    try:
        stat = path.stat()
        return WeightFile(str(path.absolute()), stat.st_size, read, _version(path, stat))
    except OSError as error:  # Also raised for a dangling link.
        raise explain_disk_error(error, path) from None


def _version(path: Path, stat: os.stat_result) -> str:
    """Return a text that differs when the content under a file's name does."""
    # In the hub's cache a file is named by its checksum.
    if path.is_symlink() and (blob := path.resolve()).parent.name == "blobs":
        return blob.name
    return f"{stat.st_mtime_ns} {stat.st_size} {stat.st_ino} {stat.st_ctime_ns}"


def weight_file(address: str) -> WeightFile:
    """Return the file of weights at a path or an address in a bucket; raises as `on_disk`."""
    if not is_bucket(address):
        return on_disk(Path(address))
    folder, _, name = address.rpartition("/")
    file = BucketFolder(folder).find(name)
    if file is None:
        raise CheckpointError(f"{address} is missing; upload the checkpoint again")
    return file


def _hub_id(source: str) -> str:
    try:
        validate_repo_id(source)
        valid = source.count("/") == 1 and not source.startswith((".", "/", "~"))
    except HFValidationError:
        valid = False
    if not valid:
        raise CheckpointError(f"{source} is neither a directory nor a hub id (OWNER/NAME)")
    return source
