"""Diffusers checkpoints: open, check and read them, one component at a time."""

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import safetensors
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jax.sharding import Mesh, NamedSharding

from wan_tpu.bridge import Params, ScannedBlocks, scan_blocks, stackable
from wan_tpu.errors import CheckpointError
from wan_tpu.mesh import Rule, replicated, weight_spec
from wan_tpu.program import place
from wan_tpu.weights import Stored, read_weight

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class Checkpoint:
    """A diffusers directory, on disk or on the Hugging Face hub; only JSON and safetensors are read."""

    def __init__(self, source: str | Path) -> None:
        """Open `source`, a folder with a model_index.json or a hub id; weights are fetched when read.

        Raises `CheckpointError` when it is neither, or its index can't be read.
        """
        if not isinstance(source, str | Path) or not str(source):
            raise CheckpointError(f"the model is {source!r}; give a diffusers directory or a hub id")
        local = Path(source)
        # Absolute, so that stage files mean the same from every folder.
        self.source = str(local.resolve()) if local.exists() else str(source)
        self._hub_id = None if local.exists() else _hub_id(self.source)
        self.folder = local if self._hub_id is None else self._fetch(["*.json", "tokenizer/*"])
        self.index = self._json("model_index.json")

    def has(self, component: str) -> bool:
        """Whether the index names this component (diffusers writes [null, null] for an absent one)."""
        entry = self.index.get(component) or [None, None]
        if not isinstance(entry, list) or len(entry) != 2:
            raise CheckpointError(f"{self.source}/model_index.json has {component}: {entry!r}; fetch it again")
        return entry[0] is not None

    def class_name(self, component: str) -> str:
        """Return the class that the index gives for `component`."""
        return self.index[component][1]

    def config(self, component: str, file: str = "config.json") -> dict[str, Any]:
        """Return a component's configuration."""
        return self._json(f"{component}/{file}")

    def path(self, component: str) -> Path:
        """Return a component's folder on disk, fetched from the hub when it isn't there."""
        if self._hub_id is not None:
            self._fetch([f"{component}/*.safetensors", f"{component}/*.json"])
        return self.folder / component

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads((self.folder / name).read_text())
        except OSError:
            raise CheckpointError(
                f"{self.source} has no {name}; give a diffusers directory (with model_index.json) or a hub id"
            ) from None
        except ValueError as error:
            raise CheckpointError(f"{self.folder / name} is no JSON ({error}); fetch it again") from None
        if not isinstance(content, dict):
            raise CheckpointError(f"{self.folder / name} is no JSON object; fetch it again")
        return content

    def _fetch(self, patterns: Sequence[str]) -> Path:
        try:
            return Path(huggingface_hub.snapshot_download(str(self._hub_id), allow_patterns=list(patterns)))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                f"can't fetch {self._hub_id} from the Hugging Face hub ({reason}); "
                "check the id and the network, or give a local directory"
            ) from None


def _hub_id(source: str) -> str:
    try:
        huggingface_hub.utils.validate_repo_id(source)
        valid = source.count("/") == 1 and not source.startswith((".", "/", "~"))
    except HFValidationError:
        valid = False
    if not valid:
        raise CheckpointError(f"{source} is neither a directory nor a hub id like Wan-AI/Wan2.2-I2V-A14B-Diffusers")
    return source


@dataclass(frozen=True)
class Component:
    """How one torch module of a checkpoint is built, adapted and laid out.

    folder    of the checkpoint
    build     makes the module as diffusers or transformers define it
    adapt     changes it before use: replaces pieces, drops parts that this component doesn't run
    scanned   paths of block lists to stack and scan
    rules     sharding of every weight that is left after `adapt`
    float32   name parts (between dots) of weights that stay in float32 whatever the dtype
    renames   (pattern, replacement) applied to the names in the files
    changes   (pattern, function) applied to the values of weights whose whole name matches, as they are read
    """

    folder: str
    build: Callable[[], torch.nn.Module]
    adapt: Callable[[torch.nn.Module, Mesh], None]
    scanned: tuple[str, ...]
    rules: tuple[Rule, ...]
    float32: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    changes: tuple[tuple[str, Callable[[np.ndarray], np.ndarray]], ...] = ()


@dataclass(frozen=True)
class Loaded:
    """A component ready to run: a module on the meta device and its weights on the mesh."""

    module: torch.nn.Module
    params: Params


def load_component(checkpoint: Checkpoint, component: Component, dtype: str, mesh: Mesh) -> Loaded:
    """Build a component and fill it from its safetensors files, on `mesh`, in `dtype`.

    Host memory holds one weight at a time (one stacked weight of a scanned block list) beside what is on the
    devices. Raises `CheckpointError` naming the tensors that are missing, too many, of a wrong shape or cut off,
    before any of them is read.
    """
    module, stored = check_component(checkpoint, component)
    component.adapt(module, mesh)
    depths = _scan(module, component.scanned)
    return Loaded(module, dict(_weights(module, depths, stored, component, dtype, mesh)))


def check_component(checkpoint: Checkpoint, component: Component) -> tuple[torch.nn.Module, dict[str, Stored]]:
    """Build a component and compare it with the headers of its files; return the module and where its tensors lie.

    Raises `CheckpointError` naming the tensors that are missing, too many, of a wrong shape or cut off.
    """
    try:
        module = _build(component)
    except Exception as error:  # whatever a constructor makes of a damaged config.json
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise CheckpointError(
            f"{checkpoint.source}/{component.folder}/config.json describes no such model ({reason}); fetch it again"
        ) from error
    stored = _index(checkpoint.path(component.folder), component)
    _check(module, stored, component, checkpoint)
    return module, stored


def abstract_component(component: Component, dtype: str, mesh: Mesh) -> Loaded:
    """Build a component with shapes and shardings in place of weights, to compile it without a checkpoint."""
    module = _build(component)
    component.adapt(module, mesh)
    depths = _scan(module, component.scanned)
    params: dict[str, Any] = {}
    for name, tensor in _tensors(module):
        plain, depth = _plain_name(name, depths)
        kept = tensor.is_floating_point() and not tensor.is_meta
        kind = np.float32 if kept or _keeps_float32(plain, component) else DTYPES[dtype]
        shape = tuple(tensor.shape) if depth is None else (depth, *tensor.shape)
        if not tensor.is_meta:
            params[name] = jax.ShapeDtypeStruct(shape, tensor.numpy().dtype, sharding=replicated(mesh))
            continue
        spec = weight_spec(mesh, component.rules, plain, tensor.shape, stacked=depth is not None)
        sharding = NamedSharding(mesh, spec)
        params[name] = jax.ShapeDtypeStruct(shape, kind, sharding=sharding)
    return Loaded(module, params)


_building = threading.Lock()  # accelerate patches torch.nn.Module while a module is built


def _build(component: Component) -> torch.nn.Module:
    # Parameters go to the meta device; tables that a module computes for itself (RoPE) stay real.
    with _building, accelerate.init_empty_weights(include_buffers=False):
        module = component.build().eval().requires_grad_(False)
    for alias, name in _tied(module).items():
        parent, _, leaf = alias.rpartition(".")
        module.get_submodule(parent).register_parameter(leaf, module.get_parameter(name))
    return module


def _tied(module: torch.nn.Module) -> dict[str, str]:
    """Return which parameters share the values of which other ones, as transformers declares it."""
    return getattr(module, "_tied_weights_keys", None) or {}


def _index(folder: Path, component: Component) -> dict[str, Stored]:
    """Return every tensor in a folder by the name the module uses, from the files' headers alone."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if indexes:
        try:
            names = sorted(set(json.loads(indexes[0].read_text())["weight_map"].values()))
            files = [folder / name for name in names]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{indexes[0]} is damaged ({error!r}); fetch it again") from None
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder} holds no .safetensors file; other formats are not read: "
            "save the model again with save_pretrained(safe_serialization=True)"
        )
    stored = {}
    for file in files:
        for name, shape in _header(file):
            renamed = name
            for pattern, replacement in component.renames:
                renamed = re.sub(pattern, replacement, renamed)
            stored[renamed] = Stored(file, name, shape)
    return stored


def _header(file: Path) -> list[tuple[str, tuple[int, ...]]]:
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            return [(name, tuple(opened.get_slice(name).get_shape())) for name in opened.keys()]  # noqa: SIM118
    except OSError:
        raise CheckpointError(f"{file} is missing or can't be read; fetch the checkpoint again") from None
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{file} is damaged or cut off ({error}); fetch it again") from None


def _check(module: torch.nn.Module, stored: dict[str, Stored], component: Component, checkpoint: Checkpoint) -> None:
    """Refuse a component whose files don't hold exactly the module's tensors."""
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict(keep_vars=True).items()}
    ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    tied = _tied(module)  # stored under either name, or both
    for alias, name in tied.items():
        if name not in stored and alias in stored:
            stored[name] = stored[alias]
    missing = [name for name in expected if name not in stored and name not in tied]
    extra = [
        name
        for name in stored
        if name not in expected and name not in tied and not any(re.search(p, name) for p in ignored)
    ]
    wrong = [
        f"{name} {list(stored[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    for problem, names in (("lacks", missing), ("has unknown", extra), ("has the wrong shape of", wrong)):
        if names:
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise CheckpointError(
                f"{checkpoint.source}/{component.folder} {problem} {listed}; "
                "the files don't belong to this config.json: fetch the checkpoint again"
            )


def _scan(module: torch.nn.Module, paths: Sequence[str]) -> dict[str, int]:
    """Stack the block lists at `paths`; return how deep each is."""
    depths = {}
    for path in paths:
        blocks = module.get_submodule(path)
        if isinstance(blocks, torch.nn.ModuleList) and stackable(blocks):
            depths[path] = len(blocks)
            scan_blocks(module, path)
            assert isinstance(module.get_submodule(path), ScannedBlocks)
    return depths


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    # Non-persistent buffers included, tied duplicates left out: what functional_call needs.
    yield from module.named_parameters()
    yield from module.named_buffers()


def _plain_name(name: str, depths: dict[str, int]) -> tuple[str, int | None]:
    """Return the name within one block ("blocks.*.ffn...") and the depth of its stack, if it is stacked."""
    for path, depth in depths.items():
        if name.startswith(f"{path}.template."):
            return f"{path}.*.{name.removeprefix(f'{path}.template.')}", depth
    return name, None


def _keeps_float32(name: str, component: Component) -> bool:
    return not set(component.float32).isdisjoint(name.split("."))


def _weights(
    module: torch.nn.Module,
    depths: dict[str, int],
    stored: dict[str, Stored],
    component: Component,
    dtype: str,
    mesh: Mesh,
) -> Iterator[tuple[str, jax.Array]]:
    for name, tensor in _tensors(module):
        if not tensor.is_meta:
            yield name, place(tensor.numpy(), mesh)
            continue
        plain, depth = _plain_name(name, depths)
        kind = np.dtype(np.float32) if _keeps_float32(plain, component) else DTYPES[dtype]
        spec = weight_spec(mesh, component.rules, plain, tensor.shape, stacked=depth is not None)
        parts = [stored[name]] if depth is None else [stored[plain.replace("*", str(i), 1)] for i in range(depth)]
        shape = tuple(tensor.shape) if depth is None else (depth, *tensor.shape)
        change = next((change for pattern, change in component.changes if re.fullmatch(pattern, plain)), None)
        sharding = NamedSharding(mesh, spec)
        yield name, read_weight(parts, change, shape, kind, sharding, stacked=depth is not None)
