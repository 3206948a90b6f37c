"""Run torch modules as JAX functions, through torchax. Only this file knows both.

A module stays on torch's meta device; its weights are a flat dict of jax arrays, passed in at every call and
swapped in by `functional_call`, so that `jax.jit` sees a pure function. torchax is only ever active inside
`call`: nothing is enabled globally, and weights are created before and outside of it.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

# torchax 0.0.13 registers these overloads by name at import; torch 2.13 removed them with named tensors.
# Declaring them (with any schema: nothing calls them) lets the import go through.
_REMOVED_OVERLOADS = """
    all.dimname all.dimname_out index_add.dimname index_copy.dimname index_copy_.dimname
    index_fill.Dimname_Scalar index_fill.Dimname_Tensor index_fill_.Dimname_Scalar index_fill_.Dimname_Tensor
    norm.names_ScalarOpt_dim norm.names_ScalarOpt_dim_dtype norm.names_dtype_out norm.names_out
    prod.dim_Dimname std.correction_names std.correction_names_out std.names_dim std.names_out
    std_mean.correction_names std_mean.names_dim unbind.Dimname
"""


def _declare_removed_overloads() -> torch.library.Library:
    library = torch.library.Library("aten", "FRAGMENT")
    for name in _REMOVED_OVERLOADS.split():
        packet, overload = name.split(".")
        if overload not in getattr(torch.ops.aten, packet).overloads():
            library.define(f"{name}(Tensor self) -> Tensor")
    return library


_library = _declare_removed_overloads()  # The declarations live as long as this object.

import torchax  # noqa: E402
from torchax import interop  # noqa: E402

# torch's default int64 becomes int32 in JAX. torchax asks for int64 each time, and JAX warns each time.
warnings.filterwarnings("ignore", message="Explicitly requested dtype .*int64")

Params = dict[str, jax.Array]  # Flat: arrays by the names of torch's parameters and buffers.


def select_part(params: Params, path: str) -> Params:
    """Return the weights of a submodule, by their names in it."""
    return {name.removeprefix(f"{path}."): value for name, value in params.items() if name.startswith(f"{path}.")}


def call(module: torch.nn.Module, params: Params, method: Callable[..., Any], *args: Any) -> Any:
    """Call `method(module, *args)` in torch with `params` for weights; jax arrays in, jax arrays out.

    Args:
        module: The module, on the meta device.
        params: Every parameter and buffer of `module`, non-persistent buffers included.
        method: A function of the module.
        args: Pytrees of jax arrays and plain Python values.

    Raises:
        TypeError: The method returned something that isn't a pytree of tensors.
    """
    tensors = {f"module.{name}": value for name, value in params.items()}
    with torchax.default_env():
        result = torch.func.functional_call(_Method(module, method), to_torch(tensors), tuple(to_torch(args)))
    converted = to_jax(result)
    for leaf in jax.tree.leaves(converted):
        if not isinstance(leaf, jax.Array | str):
            # JAX doesn't see a ModelOutput, for example, as a pytree: its tensors would leak out of the trace
            # unconverted.
            raise TypeError(f"the method returned a {type(leaf).__name__}; return tensors in tuples, lists or dicts")
    return converted


def to_torch(tree: Any) -> Any:
    """View jax arrays as torch tensors; only meaningful inside `call`."""
    return interop.torch_view(tree)


def to_jax(tree: Any) -> Any:
    """View such torch tensors as jax arrays."""
    return interop.jax_view(tree)


def collect_linear(**layers: Any) -> Params:
    """Return the weights and biases of layers by name, as `families.shared.layers.linear` takes them.

    The layers may be convolutions whose patches don't overlap: their weights become matrices [O, values of a patch].
    """
    return {f"{name}.weight": to_jax(layer.weight).reshape(len(layer.weight), -1) for name, layer in layers.items()} | {
        f"{name}.bias": to_jax(layer.bias) for name, layer in layers.items() if layer.bias is not None
    }


class _Method(torch.nn.Module):
    """Makes any function of a module callable by `functional_call`."""

    def __init__(self, module: torch.nn.Module, method: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.method = method

    def forward(self, *args: Any) -> Any:
        return self.method(self.module, *args)


class ScannedBlocks(torch.nn.Module):
    """A stack of equal blocks run by one `jax.lax.scan`: one block is traced and compiled, whatever the depth.

    It takes the place of the `ModuleList`. Iterating it yields one callable that runs all blocks, so the model's own
    `for block in self.blocks` stays as it is. The weights of `template` are stacked, [depth, ...].
    """

    def __init__(self, blocks: torch.nn.ModuleList) -> None:
        super().__init__()
        self.depth = len(blocks)
        self.template = blocks[0]

    def __iter__(self) -> Iterator[torch.nn.Module]:
        yield self  # The model's loop then calls it once.

    def __len__(self) -> int:
        return self.depth

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run all blocks. Each passes `hidden` to the next; all other arguments are the same for each."""
        stacked = to_jax({**dict(self.template.named_parameters()), **dict(self.template.named_buffers())})

        def block(carry: jax.Array, weights: Params) -> tuple[jax.Array, None]:
            out = torch.func.functional_call(self.template, to_torch(weights), (to_torch(carry), *args), kwargs)
            return to_jax(out), None

        return to_torch(jax.lax.scan(block, to_jax(hidden), stacked)[0])


def _are_equal(blocks: torch.nn.ModuleList) -> bool:
    """Return whether all blocks have the same parameters, by name, shape and dtype."""
    layouts = [{name: (p.shape, p.dtype) for name, p in block.named_parameters()} for block in blocks]
    return all(layout == layouts[0] for layout in layouts)


def scan_blocks(module: torch.nn.Module, path: str) -> int | None:
    """Replace the `ModuleList` at `path` by `ScannedBlocks`, if its blocks are equal; return its length, else None."""
    blocks = module.get_submodule(path)
    if not isinstance(blocks, torch.nn.ModuleList) or not _are_equal(blocks):
        return None
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, ScannedBlocks(blocks))
    return len(blocks)
