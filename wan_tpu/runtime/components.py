"""Read a checkpoint's components: torch modules without weights, and their weights on a mesh."""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import accelerate
import jax
import ml_dtypes
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError, InvalidInput
from wan_tpu.progress import Silent
from wan_tpu.runtime.bridge import Params, scan_blocks
from wan_tpu.runtime.component_files import check_tensors, index_tensors
from wan_tpu.runtime.converted import Converted, WeightCut, cut_weight
from wan_tpu.runtime.mesh import Rule, replicated_sharding, rule_of, weight_spec
from wan_tpu.runtime.program import place
from wan_tpu.runtime.tensor_files import Stored
from wan_tpu.runtime.weights import Block, Show, Weight, read_weights
from wan_tpu_kernels.low_precision import can_multiply, largest_value

_BFLOAT16, _INT8, _FLOAT8 = (np.dtype(kind) for kind in (ml_dtypes.bfloat16, np.int8, ml_dtypes.float8_e4m3fn))
# Suffixes of precisions that also compute attention's logits in 8 bits, or both of its products.
_AND_ATTENTION, _AND_BOTH = "-attention", "-attention-both"
# For each precision, the dtype of activations and of most weights; below, the dtype of large matrices in 8 bits.
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": _BFLOAT16}
MATRICES = {
    f"{name}{suffix}": kind
    for suffix in ("", _AND_ATTENTION, _AND_BOTH)
    for name, kind in (("int8", _INT8), ("float8", _FLOAT8))
}
DTYPES |= dict.fromkeys(MATRICES, _BFLOAT16)
SCALE = "_scale"  # Suffix of the name of an 8-bit weight's scales: float32, one for each row of the weight.


@dataclass(frozen=True)
class Component:
    """One torch module of a checkpoint: how it is built, adapted and sharded.

    Attributes:
        folder: Its folder in the checkpoint.
        build: Builds the module as diffusers or transformers define it.
        adapt: Changes the module before use: replaces some parts, and drops those that this component doesn't run.
        scanned: Paths of block lists to stack and scan.
        rules: Sharding of every weight that remains after `adapt`.
        float32: Name parts (between dots) of weights that stay in float32 at every precision.
        renames: (pattern, replacement) applied to the names in the files.
        changes: (pattern, function) applied to the values of weights whose whole name matches, as they are read.
        originals: (pattern, replacement) that turn a parameter's name into its name in the model's first publication;
            files of adapters use either. Parameters that map to the same name were a single matrix there: queries, keys
            and values.
        original_rows: (pattern, function) for modules whose rows are in another order in that publication. The pattern
            matches a module's original name, with dots or underscores; the function takes a matrix [O, ...] from a file
            and its name there, and returns it with the rows in our order.
        aliases: (pattern, replacement) that turn an original name into the one that other programs and trainers use.
        absent: Patterns of modules that related models have and this one doesn't use: an adapter's changes to them have
            no effect, but aren't an error.
        adapted_by: Prefixes of the tensors in an adapter's file that change this component; none for an expert, which
            all others change.
        adapted_beside: Such prefixes of other components that a file for this one may change, too.
        changed_inputs: Patterns of weights whose `changes` reorder inputs, not outputs.
        added: Weights of stacked blocks that an adapter may add to those of the checkpoint, by the program's names, and
            for each the weight whose shape, dtype and sharding it has.
        header_alpha: Whether "alpha" in an adapter's header applies to all its modules; diffusers reads it for some
            models only.
        describe_adapter: Returns what is to be known of an adapter by its path and header, as the rest of a sentence
            that begins with it, or None.
        matrices: Pattern of the weights [O, I] that may be in 8 bits, with one scale per output; "" for none.
        converted: What its weights' names begin with in a converted file, where another component of the folder has the
            same weights in another order.
        logits: Whether attention may be in 8 bits. A loaded module's attribute `logits_dtype` is the 8-bit type of its
            logits, or None, and `values_dtype` that of the product of weights and values.
    """

    folder: str
    build: Callable[[], torch.nn.Module]
    adapt: Callable[[torch.nn.Module, Mesh], None]
    scanned: tuple[str, ...]
    rules: tuple[Rule, ...]
    float32: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    changes: tuple[tuple[str, Callable[[np.ndarray], np.ndarray]], ...] = ()
    originals: tuple[tuple[str, str], ...] = ()
    original_rows: tuple[tuple[str, Callable[[torch.Tensor, str], torch.Tensor]], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    absent: tuple[str, ...] = ()
    adapted_by: tuple[str, ...] = ()
    adapted_beside: tuple[str, ...] = ()
    changed_inputs: tuple[str, ...] = ()
    added: Mapping[str, str] = field(default_factory=dict)
    header_alpha: bool = False
    describe_adapter: Callable[[str, Mapping[str, Any]], str | None] = lambda path, header: None
    matrices: str = ""
    converted: str = ""
    logits: bool = False

    def offers(self, precision: str) -> bool:
        """Return whether a model with this component offers a precision."""
        return bool(self.matrices) and (self.logits or _AND_ATTENTION not in precision)

    def kept_as(self, precision: str) -> str:
        """Return the precision that this component has in a model of the given precision."""
        if precision not in MATRICES:
            return precision
        return precision.partition(_AND_ATTENTION)[0] if self.matrices else DTYPES[precision].name

    def is_rounded(self, plain: str, precision: str) -> bool:
        """Return whether a weight is in 8 bits."""
        return precision in MATRICES and bool(self.matrices) and re.fullmatch(self.matrices, plain) is not None


@dataclass(frozen=True)
class Loaded:
    """A component ready to run: a module on the meta device and its weights on the mesh."""

    module: torch.nn.Module
    params: Params

    def with_added(self, component: Component) -> "Loaded":
        """Return the same with the shapes and shardings of all weights that an adapter may add."""
        likes = {
            name + kind: self.params[like + kind]
            for name, like in component.added.items()
            for kind in ("", SCALE)
            if like + kind in self.params
        }
        shapes: Any = {
            name: jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=like.sharding) for name, like in likes.items()
        }
        return Loaded(self.module, shapes | self.params)


class ComponentFiles(NamedTuple):
    """A component whose files have been compared with its module.

    All dictionaries are by the program's names.

    Attributes:
        module: The module, on the meta device.
        tables: Tables that the module has computed itself and that no file holds.
        weights: All other weights, including persistent buffers, with the places to read them from.
        plain: Names of the weights in a converted file.
        cuts: How the weights are laid out in a converted file.
    """

    module: torch.nn.Module
    tables: dict[str, torch.Tensor]
    weights: dict[str, Weight]
    plain: dict[str, str]
    cuts: dict[str, WeightCut]


def load_component(
    checkpoint: Checkpoint,
    component: Component,
    dtype: str,
    mesh: Mesh,
    show: Show = lambda total: Silent(),
) -> Loaded:
    """Build a component and fill it from its safetensors files.

    Args:
        component: The component.
        show: Returns the bar that counts the bytes which this process reads.

    Raises:
        CheckpointError: As for `open_component`, before any weight is read, or because a file is damaged.
        Unavailable: A file can't be read now.
    """
    contents = open_component(checkpoint, component, dtype, mesh)
    params = {name: place(table.numpy(), mesh) for name, table in contents.tables.items()}
    return Loaded(contents.module, params | read_weights(contents.weights, show))


def open_component(checkpoint: Checkpoint, component: Component, dtype: str, mesh: Mesh) -> ComponentFiles:
    """Build a component, and compare it with the headers of its files.

    Raises:
        CheckpointError: Tensors are missing, superfluous, of the wrong shape or truncated; the message names them.
        Unavailable: A file can't be read now.
    """
    try:
        module = _build(component)
    except (OSError, MemoryError):  # These are the machine's errors, not the checkpoint's.
        raise
    except Exception as error:  # A constructor can raise anything for a damaged config.json.
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise CheckpointError(
            f"{checkpoint.source}/{component.folder}/config.json can't be used to build the model ({reason}); fetch "
            "it again, or give a checkpoint that diffusers opens"
        ) from error
    converted = Converted.open(checkpoint, component.folder, component.kept_as(dtype))
    stored: dict[str, Stored] = {}
    if converted is None:
        stored = index_tensors(checkpoint, component.folder, module, component.renames, component.originals)
        check_tensors(module, _tied_names(module), stored, f"{checkpoint.source}/{component.folder}")
    component.adapt(module, mesh)
    contents = ComponentFiles(module, {}, {}, {}, {})
    for name, weight in _weights(module, component, dtype, mesh):
        if isinstance(weight, torch.Tensor):
            contents.tables[name] = weight
            continue
        if converted is None:
            blocks, change = _blocks(name, weight, stored), _change(component, weight.plain, dtype)
        else:
            blocks, change = converted.blocks(component.converted + weight.plain, weight.shape), None
        contents.weights[name] = Weight(weight.shape, weight.kind, weight.sharding, blocks, change)
        contents.plain[name] = component.converted + weight.plain
        contents.cuts[name] = cut_weight(
            weight.shape, weight.kind.itemsize, weight.axis, layers=weight.depth is not None
        )
    return contents


def _blocks(name: str, weight: "_Weight", stored: dict[str, Stored]) -> tuple[Block, ...]:
    """Return where a weight is stored in the checkpoint's own files, which hold each layer of a stack separately.

    Scales are computed from the weights that they belong to.
    """
    name, plain = name.removesuffix(SCALE), weight.plain.removesuffix(SCALE)
    names = [name] if weight.depth is None else [plain.replace("*", str(i), 1) for i in range(weight.depth)]
    shape = weight.shape if weight.depth is None else (1, *weight.shape[1:])
    blocks = []
    for layer, tensor in enumerate(stored[name] for name in names):
        start = (layer, *[0] * (len(shape) - 1)) if shape else ()
        blocks.append(Block(tensor.file, tensor.offset, tensor.kind, start, shape, tensor.shape))
    return tuple(blocks)


def _change(component: Component, plain: str, precision: str) -> Callable[[np.ndarray], np.ndarray] | None:
    whole = plain.removesuffix(SCALE)
    change = next((change for pattern, change in component.changes if re.fullmatch(pattern, whole)), None)
    if not component.is_rounded(whole, precision):
        return change
    part = int(plain != whole)
    return lambda value: round_to_8_bits(value if change is None else change(value), MATRICES[precision])[part]


def round_to_8_bits(value: np.ndarray, kind: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Round a matrix to 8 bits; return it with its scales, float32 [O], by which its rows must be multiplied.

    A row that isn't finite has a scale that isn't finite.
    """
    wide = value.astype(np.float32)
    scales = np.abs(wide).max(axis=1) / np.float32(largest_value(kind))
    with np.errstate(invalid="ignore"):
        scaled = wide / np.where(scales == 0, 1, scales)[:, None]
        return (np.rint(scaled) if kind == np.int8 else scaled).astype(kind), scales


def abstract_component(component: Component, dtype: str, mesh: Mesh) -> Loaded:
    """Build a component that has shapes and shardings instead of weights, to compile it without a checkpoint."""
    module = _build(component)
    component.adapt(module, mesh)
    params: dict[str, Any] = {}
    for name, weight in _weights(module, component, dtype, mesh):
        if isinstance(weight, torch.Tensor):
            kind = jax.dtypes.canonicalize_dtype(weight.numpy().dtype)  # JAX keeps torch's int64 as int32.
            weight = _Weight(name, None, tuple(weight.shape), kind, replicated_sharding(mesh), None)
        params[name] = jax.ShapeDtypeStruct(weight.shape, weight.kind, sharding=weight.sharding)
    return Loaded(module, params)


_building = threading.Lock()  # accelerate patches torch.nn.Module while a module is built.


def _build(component: Component) -> torch.nn.Module:
    # Parameters go to the meta device; tables that a module computes for itself (RoPE) stay real.
    with _building, accelerate.init_empty_weights(include_buffers=False):
        module = component.build().eval().requires_grad_(False)
    for alias, name in _tied_names(module).items():
        parent, _, leaf = alias.rpartition(".")
        module.get_submodule(parent).register_parameter(leaf, module.get_parameter(name))
    # Tables that a checkpoint's files hold (persistent buffers) are read from there, like parameters.
    stored = module.state_dict(keep_vars=True)
    for name, table in list(module.named_buffers()):
        if name in stored:
            parent, _, leaf = name.rpartition(".")
            module.get_submodule(parent).register_buffer(leaf, table.to("meta"))
    return module


def _tied_names(module: torch.nn.Module) -> dict[str, str]:
    """Return the parameters that share another one's values, with that one's name, as transformers declares them."""
    return getattr(module, "_tied_weights_keys", None) or {}


def _scan(module: torch.nn.Module, paths: Sequence[str]) -> dict[str, int]:
    """Stack the block lists at `paths` whose blocks are equal; return the depth of each."""
    depths = {path: scan_blocks(module, path) for path in paths}
    return {path: depth for path, depth in depths.items() if depth is not None}


def _plain_name(name: str, depths: dict[str, int]) -> tuple[str, int | None]:
    """Return the name within one block ("blocks.*.ffn...") and the depth of its stack, if it is stacked."""
    for path, depth in depths.items():
        if name.startswith(f"{path}.template."):
            return f"{path}.*.{name.removeprefix(f'{path}.template.')}", depth
    return name, None


def _check_chip(component: Component, precision: str, mesh: Mesh) -> None:
    """Raise `InvalidInput` for a precision that the TPU, present or only described, can't multiply in."""
    device = mesh.devices.flat[0]
    if device.platform != "tpu" or not component.matrices or precision not in MATRICES:
        return
    with jax.set_mesh(mesh):
        able = [
            name for name in DTYPES if name not in MATRICES or (component.offers(name) and can_multiply(MATRICES[name]))
        ]
    if precision not in able:
        raise InvalidInput(f"{device.device_kind} can't compute in {precision}; choose one of {', '.join(able)}")


class _Weight(NamedTuple):
    """A weight as the mesh holds it; plain and depth as `_plain_name` returns them.

    Attributes:
        axis: The first dimension of the weight's shape that its rule shards.
    """

    plain: str
    depth: int | None
    shape: tuple[int, ...]
    kind: np.dtype
    sharding: NamedSharding
    axis: int | None


def _weights(
    module: torch.nn.Module, component: Component, precision: str, mesh: Mesh
) -> Iterator[tuple[str, _Weight | torch.Tensor]]:
    """Stack a module's blocks; yield everything that `functional_call` needs by name: weights, and the module's tables.

    Non-persistent buffers are included; tied duplicates are left out.
    """
    _check_chip(component, precision, mesh)
    depths = _scan(module, component.scanned)
    has_8_bit_logits = component.logits and _AND_ATTENTION in precision
    module.logits_dtype = MATRICES[precision].name if has_8_bit_logits else None
    module.values_dtype = module.logits_dtype if precision.endswith(_AND_BOTH) else None
    for name, tensor in list(module.named_parameters()):
        if component.is_rounded(_plain_name(name, depths)[0], precision):
            owner, _, leaf = name.rpartition(".")
            scales = torch.nn.Parameter(torch.empty(len(tensor), device="meta"), requires_grad=False)
            module.get_submodule(owner).register_parameter(leaf + SCALE, scales)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.is_meta:
            yield name, tensor
            continue
        plain, depth = _plain_name(name, depths)
        exact = not set(component.float32).isdisjoint(plain.split(".")) or plain.endswith(SCALE)
        kind = DTYPES["float32" if exact else precision]
        kind = MATRICES[precision] if component.is_rounded(plain, precision) else kind
        stacked = depth is not None
        rule = rule_of(component.rules, plain)
        axis = next((i + stacked for i, axes in enumerate(rule.spec) if axes is not None), None)
        sharding = NamedSharding(mesh, weight_spec(mesh, component.rules, plain, tensor.shape, stacked=stacked))
        shape = tuple(tensor.shape) if depth is None else (depth, *tensor.shape)
        yield name, _Weight(plain, depth, shape, kind, sharding, axis)
