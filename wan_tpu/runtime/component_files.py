"""Find the files that hold a component's weights and the tensors in them, and explain what is wrong with them."""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.runtime.tensor_files import Stored, locate_tensors
from wan_tpu.runtime.torch_files import SUFFIXES, locate_torch_tensors
from wan_tpu.sources.disk import read_file
from wan_tpu.sources.hub import advise_on_download
from wan_tpu.storage.folder import WeightFile

_ENDING, _INDEX = ".safetensors", ".safetensors.index.json"
_OTHER_FORMATS = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth"}
_STEMS = "diffusion_pytorch_model", "model"  # Names of the files that diffusers and transformers read, without endings.
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
# Names of the extra tensors in files with 8-bit or 4-bit weights, alone or after a layer's name, as ComfyUI, DeepSeek
# and compressed-tensors, bitsandbytes, and GPTQ write them.
QUANTISED = re.compile(
    r"(^|\.)(scaled_fp8|comfy_quant|scale_weight|scale_input|weight_scale|weight_scale_inv|weight_scale_2|input_scale|"
    r"int8_weight|absmax|quant_map|quant_state\.\w+|SCB|qweight|qzeros)$"
)

Renames = Sequence[tuple[str, str]]


def original_name(name: str, originals: Renames) -> str:
    """Return a parameter's name in the model's first publication: see `Component.originals`."""
    for pattern, replacement in originals:
        name = re.sub(pattern, replacement, name)
    return name


def index_tensors(
    checkpoint: Checkpoint, component: str, module: torch.nn.Module, renames: Renames, originals: Renames
) -> dict[str, Stored]:
    """Return every tensor of a component by the name that the module uses, from the files' headers alone.

    The files may use the names of the model's first publication, and hold a convolution's weight as a matrix.

    Args:
        checkpoint: The checkpoint whose files are read.
        component: The component's folder in it.
        module: The component, for the names and shapes of its tensors.
        renames: (pattern, replacement) applied to the names in the files.
        originals: See `Component.originals`.

    Raises:
        CheckpointError: The files don't exist, or several candidates match.
        Unavailable: The bucket, the hub or the disk doesn't answer.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict(keep_vars=True).items()}
    known = {original_name(name, originals): name for name in shapes}
    stored: dict[str, Stored] = {}
    for file in _weight_files(checkpoint, component):
        locate = locate_torch_tensors if file.address.endswith(SUFFIXES) else locate_tensors
        for name, tensor in locate(file).items():
            renamed = name
            for pattern, replacement in renames:
                renamed = re.sub(pattern, replacement, renamed)
            renamed = renamed if renamed in shapes else known.get(renamed, renamed)
            shape = shapes.get(renamed, ())
            if len(shape) > 2 and tensor.shape == (shape[0], math.prod(shape[1:])):
                tensor = tensor._replace(shape=shape)
            stored[renamed] = tensor
    return stored


def _weight_files(checkpoint: Checkpoint, component: str) -> Iterator[WeightFile]:
    """Yield the files that diffusers or transformers would read, wherever they are; raises as `index_tensors`."""
    folder, indexes = f"{checkpoint.source}/{component}", _read_indexes(checkpoint.path(component))
    download = advise_on_download(checkpoint.folder)
    files = checkpoint.weights(component, _list_needed(indexes)) or checkpoint.weights(component)
    # Files written by torch.save replace those in the folder.
    stands_in = any(name.endswith(SUFFIXES) for name in files)
    if not files and not indexes:
        raise CheckpointError(
            f"{folder} holds no {_ENDING} file; {_advise_on_format(checkpoint.path(component), download)}"
        )
    names = sorted(files) if stands_in else _choose(files, indexes, folder)
    for name in names:
        if name not in files:
            remedy = download or "fetch the checkpoint again, or delete the *.index.json that names it"
            raise CheckpointError(f"{folder}/{name} is missing or can't be read; {remedy}")
        yield files[name]


def _advise_on_format(folder: Path, download: str | None) -> str:
    """Return what to do about a component without safetensors: it has another format, or wasn't fetched."""
    save = "save the model again with save_pretrained(safe_serialization=True)"
    if any(file.suffix in _OTHER_FORMATS for file in folder.glob("*")):
        return f"the formats that it has can't be read: {save}"
    return download or f"fetch the checkpoint again, or if it has another format, {save}"


def _read_indexes(folder: Path) -> dict[str, list[str]]:
    indexes = {}
    for path in folder.glob(f"*{_INDEX}"):
        try:
            names = sorted(set(json.loads(read_file(path))["weight_map"].values()))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged ({error!r}); fetch it again") from None
        indexes[path.name.removesuffix(_INDEX)] = names
    return indexes


def _list_needed(indexes: Mapping[str, list[str]]) -> list[str]:
    """Return the files that `_choose` would pick from a folder with the names of diffusers or transformers."""
    for stem in _STEMS:
        if stem in indexes:
            return [f"{stem}{_ENDING}"] * (stem == _STEMS[1]) + indexes[stem]
    return [f"{stem}{_ENDING}" for stem in _STEMS]


def _choose(files: Collection[str], indexes: Mapping[str, list[str]], folder: str) -> list[str]:
    """Return the names of the files that hold a component's weights; no others beside them are read.

    These are the files named as diffusers and transformers name them. If there are none, all files are read, which must
    then be a single variant: one file, or the shards of one.
    """
    indexed = {name for names in indexes.values() for name in names}
    variants: dict[str, list[str]] = {}
    for name in sorted(files):
        if name not in indexed:
            variants.setdefault(_SHARD.sub("", name.removesuffix(_ENDING)), []).append(name)
    for stem, names in indexes.items():
        # transformers prefers a single whole file to an index; diffusers reads its index first.
        whole = f"{stem}{_ENDING}"
        variants[stem] = [whole] if stem == _STEMS[1] and whole in files else names
    for stem in _STEMS:
        if stem in variants:
            return variants[stem]
    if len(variants) > 1:
        first = [names[0] for names in variants.values()]
        raise CheckpointError(
            f"{folder} has {' and '.join(first[:4])}, and none of them has the name that diffusers expects; keep "
            f"only one, or rename it to {_STEMS[0]}{_ENDING}"
        )
    return next(iter(variants.values()))


def check_tensors(module: torch.nn.Module, tied: Mapping[str, str], stored: dict[str, Stored], folder: str) -> None:
    """Refuse a component whose files don't hold exactly the module's tensors.

    Args:
        module: The component.
        tied: Parameters that share another one's values, with the name of that one. Files have either name, or both.
        stored: The tensors of the files. A shared value that is stored under one name is added under the other, too.
        folder: The files' folder, for messages.

    Raises:
        CheckpointError: Tensors are missing, unknown, of another shape, or quantised; the message names them.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict(keep_vars=True).items()}
    ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    for alias, name in tied.items():
        if name not in stored and alias in stored:
            stored[name] = stored[alias]
    missing = [name for name in expected if name not in stored and name not in tied]
    extra = [
        name
        for name in stored
        if name not in expected and name not in tied and not any(re.search(p, name) for p in ignored)
    ]
    if quantised := [name for name in extra if QUANTISED.search(name)]:
        raise CheckpointError(
            f"{folder} holds quantised weights ({quantised[0]}), which can't be read; give the same model in bfloat16, "
            "float16 or float32, and --precision int8 or float8, which rounds it to 8 bits"
        )
    wrong = [
        f"{name} {list(stored[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    for problem, names in (("lacks", missing), ("has unknown", extra), ("has the wrong shape of", wrong)):
        if names:
            examples = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise CheckpointError(
                f"{folder} {problem} {examples}: its files don't match its config.json; fetch both again from the "
                "same place or, if they were published like that, give another checkpoint of this model"
            )
