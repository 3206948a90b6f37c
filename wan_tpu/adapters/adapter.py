"""An adapter laid out as an expert's program holds its weights: stacked layer by layer, rows in the program's order."""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

from wan_tpu.adapters.files import Changes, ModuleChange, compute_checksum, read, refuse
from wan_tpu.adapters.location import AdapterFile, find
from wan_tpu.runtime.bridge import ScannedBlocks
from wan_tpu.runtime.component_files import original_name
from wan_tpu.runtime.components import DTYPES, MATRICES, SCALE, Component, Loaded
from wan_tpu.runtime.weights import as_numpy

_MODULATION = "scale_shift_table"  # Diffusers' name of the parameter that `diff_m` changes.
_FUSED = re.compile(r"_([qkv])(_proj)?\.\w+$")  # to_q and add_q_proj, which some formats fuse with others.
_SET = "set_weight"
_LEAVES = {"diff": "weight", "diff_b": "bias", "up_bias": "bias", "diff_m": _MODULATION, _SET: _SET}


@dataclass(frozen=True)
class Factors:
    """A low-rank change of a weight: gain * (up @ down), in each layer of a stack. R ranks, O outputs, I inputs.

    Attributes:
        up: [depth, O, R], or [O, R] if the weight isn't a stack. In the weight's dtype, or bfloat16 if the weight has 8
            bits.
        down: [depth, R, I] or [R, I], in the dtype of `up`.
        gain: float32 [depth, R] or [R]; zero for ranks that a layer doesn't have.
    """

    up: np.ndarray
    down: np.ndarray
    gain: np.ndarray


@dataclass(frozen=True)
class Adapter:
    """A file's changes to an expert's weights, in host memory, by the program's names.

    A weight may have factors, a difference, or both.

    Attributes:
        factors: The low-rank changes, by weight.
        differences: Whole differences, by weight: float32 in the weight's shape.
        added: Weights that the base doesn't have, whole and in the dtype that they would have in it, or bfloat16 if
            that has 8 bits.
        checksum: A checksum of the file's content; files with the same content give the same weights.
        warnings: What the file asks for that isn't done.
    """

    factors: Mapping[str, Factors]
    differences: Mapping[str, np.ndarray]
    added: Mapping[str, np.ndarray]
    checksum: str
    warnings: tuple[str, ...] = ()

    @property
    def changes_something(self) -> bool:
        """Whether there is any change."""
        return bool(self.factors or self.differences or self.added)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        parts = [part for factors in self.factors.values() for part in (factors.up, factors.down, factors.gain)]
        return sum(array.nbytes for array in (*parts, *self.differences.values(), *self.added.values()))


class _Slot(NamedTuple):
    """The place of a parameter of diffusers' module: a program's weight, and the layer in it if that is a stack.

    Attributes:
        weight: The name of the program's weight.
        layer: The layer in a stack, or None without one.
        shape: The parameter's shape.
        change: The function that reorders the parameter's rows for the program, if they are reordered.
        of_inputs: Whether it reorders the inputs instead.
        part: The parameter's place among those that some files fuse into one matrix: queries, then keys, then values.
    """

    weight: str
    layer: int | None
    shape: tuple[int, ...]
    change: Callable[[np.ndarray], np.ndarray] | None
    of_inputs: bool
    part: int


class _Weight(NamedTuple):
    """A weight of the program, with the dtype of its factors and the depth of its stack (None without one)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    depth: int | None


class Targets:
    """The weights of an expert that an adapter may change, by every name that files use for them."""

    def __init__(self, component: Component, loaded: Loaded) -> None:
        self._weights: dict[str, _Weight] = {}
        self._absent, self._original_rows = component.absent, component.original_rows
        self._component = component
        self._slots: dict[tuple[str, str], list[_Slot]] = {}
        depths = {
            path: module.depth for path, module in loaded.module.named_modules() if isinstance(module, ScannedBlocks)
        }
        for name, _ in loaded.module.named_parameters():
            if name.endswith(SCALE):
                continue
            array: Any = loaded.params[name]
            path = next((path for path in depths if name.startswith(f"{path}.template.")), None)
            depth = None if path is None else depths[path]
            kind = np.dtype(array.dtype)
            kind = DTYPES["bfloat16"] if kind in MATRICES.values() else kind
            self._weights[name] = _Weight(tuple(array.shape), kind, depth)
            rest = name if path is None else name.removeprefix(f"{path}.template.")
            plain = name if path is None else f"{path}.*.{rest}"
            change = next((change for pattern, change in component.changes if re.fullmatch(pattern, plain)), None)
            shape = tuple(array.shape) if depth is None else tuple(array.shape[1:])
            for layer in [None] if depth is None else range(depth):
                full_name = name if layer is None else f"{path}.{layer}.{rest}"
                part = _FUSED.search(full_name)
                of_inputs = any(re.fullmatch(pattern, plain) for pattern in component.changed_inputs)
                self._add(
                    full_name,
                    component,
                    _Slot(name, layer, shape, change, of_inputs, "qkv".find(part[1]) if part else 0),
                )
        for name, like in component.added.items():
            if name not in self._weights:
                self._add_missing(name, like)

    def _add_missing(self, name: str, like: str) -> None:
        """Let files set a weight that the base doesn't have, and that has the shape of another one, a stack."""
        weight = self._weights[name] = self._weights[like]
        assert weight.depth is not None
        path, _, rest = name.partition(".template.")
        for layer in range(weight.depth):
            full_name = f"{path}.{layer}.{rest.removesuffix('weight')}{_SET}"
            self._add(full_name, self._component, _Slot(name, layer, weight.shape[1:], None, False, 0))

    def _add(self, full_name: str, component: Component, slot: _Slot) -> None:
        original = original_name(full_name, component.originals)
        names = full_name, original, original_name(original, component.aliases)
        leaf = full_name.rpartition(".")[2]
        known = {(name.rpartition(".")[0], leaf) for name in names}
        # A parameter that isn't a module's weight or bias is also listed under its whole name.
        if leaf not in ("weight", "bias"):
            known |= {(name, "weight") for name in names}
        for module, leaf in known | {(module.replace(".", "_"), leaf) for module, leaf in known}:
            slots = self._slots.setdefault((module, leaf), [])
            slots.append(slot)
            slots.sort(key=lambda slot: slot.part)

    def read(self, path: str) -> Adapter:
        """Read a file, or raise `InvalidRequest` naming the tensors that don't belong to this model."""
        return self.read_file(find(path), path)

    def read_file(self, file: AdapterFile, path: str) -> Adapter:
        """Read a file that was found; errors as of `read`."""
        component = self._component
        changes = read(
            file,
            path,
            header_alpha=component.header_alpha,
            prefixes=component.adapted_by,
            beside=component.adapted_beside,
            describe=component.describe_adapter,
        )
        return self.adapter(path, changes)

    def adapter(self, path: str, changes: Changes) -> Adapter:
        """Lay out a file's changes, as `files.read` returns them.

        Raises:
            InvalidRequest: Some tensors don't belong to this model; the message names them.
        """
        pairs: dict[str, dict[int | None, tuple[torch.Tensor, torch.Tensor, float]]] = {}
        differences: dict[str, np.ndarray] = {}
        added: dict[str, dict[int | None, torch.Tensor]] = {}
        unknown, wrong, again, idle = (list[str]() for _ in range(4))

        def find_slots(change: ModuleChange, module: str, part: str) -> list[_Slot]:
            slots = self._slots.get((module, _LEAVES.get(part, "weight")), [])
            if not slots:
                (idle if any(re.fullmatch(pattern, module) for pattern in self._absent) else unknown).append(
                    change.names[part]
                )
            return slots

        def refuse_shape(change: ModuleChange, part: str, expected: object) -> None:
            wrong.append(f"{change.names[part]} {list(change.tensors[part].shape)} for {expected}")

        def order_rows(change: ModuleChange, module: str, part: str) -> torch.Tensor:
            """Return a tensor of the file with its rows in the order of diffusers' module."""
            rows, name = change.tensors[part], change.names[part]
            reorder = next((f for pattern, f in self._original_rows if re.fullmatch(pattern, module)), None)
            return rows if reorder is None else reorder(rows, name)

        for module, change in changes.items():
            if "down" in change.tensors and (slots := find_slots(change, module, "down")):
                down, up = change.tensors["down"].flatten(1), order_rows(change, module, "up").flatten(1)
                rows, rank = [slot.shape[0] for slot in slots], len(down)
                inputs = {int(np.prod(slot.shape[1:])) for slot in slots}
                if up.shape != (sum(rows), rank) or inputs != {down.shape[1]}:
                    refuse_shape(change, "up", f"[{sum(rows)}, {max(inputs)}] and {change.names['down']}")
                    continue
                for slot, piece in zip(slots, up.split(rows), strict=True):
                    layers = pairs.setdefault(slot.weight, {})
                    if slot.layer in layers:
                        again.append(change.names["down"])
                    layers[slot.layer] = piece, down, change.gain
            for part, gain in (("diff", 1.0), ("diff_b", 1.0), ("diff_m", 1.0), ("up_bias", change.gain)):
                if part not in change.tensors or not (slots := find_slots(change, module, part)):
                    continue
                value = order_rows(change, module, part)
                whole = (sum(slot.shape[0] for slot in slots), *slots[0].shape[1:])
                if tuple(value.shape) != whole:
                    refuse_shape(change, part, list(whole))
                    continue
                for slot, piece in zip(slots, value.split([slot.shape[0] for slot in slots]), strict=True):
                    self._add_difference(differences, slot, as_numpy(piece.float()) * np.float32(gain))
            if _SET in change.tensors:
                for slot in find_slots(change, module, _SET):
                    if tuple(change.tensors[_SET].shape) != slot.shape:
                        refuse_shape(change, _SET, list(slot.shape))
                    added.setdefault(slot.weight, {})[slot.layer] = change.tensors[_SET]
        refuse(path, "is for another model: this one doesn't have {}", unknown)
        refuse(path, "is for another model: its tensors don't have this model's shapes: {}", wrong)
        refuse(path, "changes the same weights twice: {}; remove one of the two", again)
        depths = {name: self._weights[name].shape[0] for name in added}
        partial = [
            f"{name} of {len(added[name])} layers of {depth}"
            for name, depth in depths.items()
            if len(added[name]) < depth
        ]
        refuse(path, "sets {}; fetch it again", partial)
        warnings = list(changes.warnings)
        if idle:
            warnings.append(
                f"adapter {path} changes {len(idle)} modules that this model doesn't have; this has no effect (the "
                f"first is {idle[0]})"
            )
        factors = {name: self._stack(name, layers) for name, layers in pairs.items()}
        stacked = {
            name: np.stack([_to_numpy(layers[i], self._weights[name].dtype) for i in range(depths[name])])
            for name, layers in added.items()
        }
        return Adapter(factors, differences, stacked, compute_checksum(changes), tuple(warnings))

    def _add_difference(self, differences: dict[str, np.ndarray], slot: _Slot, value: np.ndarray) -> None:
        weight = self._weights[slot.weight]
        whole = differences.setdefault(slot.weight, np.zeros(weight.shape, np.float32))
        whole[... if slot.layer is None else slot.layer] += value if slot.change is None else slot.change(value)

    def _stack(self, name: str, layers: dict[int | None, tuple[torch.Tensor, torch.Tensor, float]]) -> Factors:
        weight, rank = self._weights[name], max(len(down) for _, down, _ in layers.values())
        slots = {slot.layer: slot for group in self._slots.values() for slot in group if slot.weight == name}
        shape = weight.shape if weight.depth is None else weight.shape[1:]
        depth = () if weight.depth is None else (weight.depth,)
        up = np.zeros((*depth, shape[0], rank), weight.dtype)
        down = np.zeros((*depth, rank, int(np.prod(shape[1:]))), weight.dtype)
        gain = np.zeros((*depth, rank), np.float32)
        for layer, (up_piece, down_piece, factor) in layers.items():
            here = ... if layer is None else layer
            slot, have = slots[layer], len(down_piece)
            rows, columns = _to_numpy(up_piece, weight.dtype), _to_numpy(down_piece, weight.dtype)
            if slot.change is not None and slot.of_inputs:
                columns = slot.change(columns)
            elif slot.change is not None:
                rows = slot.change(rows)
            up[here][:, :have], down[here][:have] = rows, columns
            gain[here][:have] = factor
        return Factors(up, down, gain)


def _to_numpy(value: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    return as_numpy(value.to(torch.bfloat16 if dtype == ml_dtypes.bfloat16 else torch.float32).contiguous())
