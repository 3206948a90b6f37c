"""The content of an adapter's file: its tensors, by the names of the modules that they change.

Formats: peft's and diffusers' `lora_A`, `lora_B`; kohya's and musubi-tuner's `lora_down`, `lora_up` with `alpha`, and
their names in which underscores stand for dots; whole differences `diff` (weight), `diff_b` (bias), `diff_m`
(modulation) as LightX2V and Kijai publish them, LyCORIS' `w_norm` and `b_norm`; FastVideo's `set_weight`, matrices that
the base model doesn't have. Alpha may also be in the header (`lora_adapter_metadata`, diffusers; `alpha`, LightX2V) or
beside the file (adapter_config.json, peft).
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from wan_tpu.adapters.header import list_unmet
from wan_tpu.adapters.location import AdapterFile, attribute_errors, check_unchanged
from wan_tpu.errors import CheckpointError, InvalidRequest
from wan_tpu.runtime.component_files import QUANTISED
from wan_tpu.runtime.tensor_files import locate_tensors, read_metadata
from wan_tpu.runtime.weights import read_tensors

# The largest file in bytes. LTX-2.5's distilled adapter, of rank 450, has about 8.3 GiB; whole differences for every
# weight of a 14B model would be 28.
LARGEST = 10 * 2**30
_LARGEST_ALPHA = 1e30  # Far beyond any real alpha, and float32 can hold it.
# Prefixes of a module's name, as written by peft, DistributedDataParallel, ComfyUI, DiffSynth, diffusers and
# OneTrainer.
_PEFT = "base_model.model."
_PREFIXES = (
    _PEFT,
    "module.",
    "model.diffusion_model.",
    "diffusion_model.",
    "pipe.dit.",
    "transformer.",
    "lora_transformer.",
)
# Other components that trainers and diffusers store changes of in the same file.
_OTHERS = re.compile(
    r"(?:pipe\.)?(text_embedding_projection|connectors|text_encoders?(?:_\d)?|transformer_ref|vae|lora_te\d?)[._]"
)
# Prefixes of names with underscores for dots: kohya, musubi-tuner, OneTrainer, LyCORIS. VideoX-Fun writes one more "_".
_FLAT_PREFIX = re.compile(r"^(lora_unet|lora_transformer|lycoris)_{1,2}")
_COMPILED = "_orig_mod."  # torch.compile inserts this into the names of the whole module or of its blocks.
# The end of a name, after the module's. In `lora_A.default.weight`, "default" is peft's name for the adapter.
_LEAF = r"(\.(?!weight$|bias$)\w+)?(\.weight)?$"
_PARTS = (
    ("down", re.compile(rf"\.(lora_A|lora_down|lora\.down|lora_linear_layer\.down){_LEAF}")),
    ("up", re.compile(rf"\.(lora_B|lora_up|lora\.up|lora_linear_layer\.up){_LEAF}")),
    ("up_bias", re.compile(r"\.(lora_B|lora_up|lora\.up)(\.\w+)?\.bias$")),
    ("alpha", re.compile(r"\.alpha$")),
    ("diff", re.compile(r"\.(diff|w_norm)$")),
    ("diff_b", re.compile(r"\.(diff_b|b_norm)$")),
    ("diff_m", re.compile(r"\.diff_m$")),
    ("set_weight", re.compile(r"\.set_weight$")),
)
# FastVideo's format counts the tensors of each of these kinds in its header.
_FASTVIDEO = "fastvideo-lora-v2"
_COUNTED = {
    "low_rank_tensors": ("down", "up"),
    "diff_tensors": ("diff", "diff_b"),
    "set_weight_tensors": ("set_weight",),
}
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)  # Integer types of quantised weights.
APPLIED = "lora_A and lora_B (or lora_down and lora_up), alpha, diff, diff_b, diff_m and set_weight"


@dataclass
class ModuleChange:
    """A file's change of one module: delta W = gain * (up @ down), or a full difference.

    Attributes:
        names: The names that the tensors have in the file, by part.
        tensors: The tensors by part: "down" [R, I...], "up" [O, R], "up_bias" [O], "alpha", "diff", "diff_b", "diff_m",
            "set_weight" [O, I].
        gain: The factor of up @ down.
    """

    names: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    gain: float = 1.0


class Changes(dict[str, ModuleChange]):
    """A file's changes of an expert, keyed by module name as the file spells it, without its prefix.

    Attributes:
        warnings: What the file asks for that isn't done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []


def read(
    file: AdapterFile,
    path: str,
    *,
    header_alpha: bool = False,
    prefixes: tuple[str, ...] = (),
    beside: tuple[str, ...] = (),
    describe: Callable[[str, Mapping[str, Any]], str | None] = lambda path, header: None,
) -> Changes:
    """Read the changes of an expert, or of another component, in a file.

    Args:
        file: From `find`.
        path: The request's name for it, for messages.
        header_alpha: Whether "alpha" in the header applies to all modules without one of their own.
        prefixes: Of the tensors that change the other component. A file may have none.
        beside: Of the tensors that change other components, to which they are applied.
        describe: The component's `describe_adapter`.

    Raises:
        InvalidRequest: Tensors are unknown, quantised, unpaired, of an impossible shape, or not finite; the message
            names them.
        Unavailable: The bucket or the disk doesn't answer, or the file was replaced meanwhile.
    """
    if file.weights.size > LARGEST:
        raise InvalidRequest(
            f"adapter {path} is {file.weights.size / 2**30:.1f} GiB; allowed: at most {LARGEST / 2**30:.0f}", "loras"
        )
    with attribute_errors(path):
        try:
            stored = locate_tensors(file.weights)
            wanted = {name: place for name, place in stored.items() if _strip(name).startswith(prefixes or "")}
            values, config = read_tensors(wanted), _read_config(file)
            metadata = read_metadata(file.weights)
        except CheckpointError:
            check_unchanged(file)  # It may look damaged only because it is being written.
            raise
        check_unchanged(file)
    changes, of_others = Changes(), dict[str, list[str]]()
    unknown, unhealthy, again, misshapen, quantised = (list[str]() for _ in range(5))
    for name, value in values.items():
        if _strip(name).startswith(beside or ("\0",)):
            continue
        if not prefixes and (other := _OTHERS.match(_strip(name))):
            of_others.setdefault(other[1], []).append(name)
            continue
        module, part = _parse_name(name, prefixes)
        if QUANTISED.search(name) or (part not in (None, "alpha") and value.dtype in _INTEGERS):
            quantised.append(name)
            continue
        if part is None:
            unknown.append(name)
            continue
        change = changes.setdefault(module, ModuleChange())
        if part in change.names:
            again.append(name)
        if (expected := _describe_misfit(part, value)) is not None:
            misshapen.append(
                f"{name}, {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}, for {expected}"
            )
        elif not torch.isfinite(value.float()).all():
            unhealthy.append(name)
        change.names[part], change.tensors[part] = name, value
    for change in changes.values():
        have = set(change.names)
        lonely = {"up", "alpha", "up_bias"} & have if "down" not in have else set() if "up" in have else {"down"}
        unknown += [change.names[part] for part in sorted(lonely)]
    refuse(
        path,
        "holds quantised weights ({}), which can't be applied; give the same adapter in bfloat16, float16 or float32",
        quantised,
    )
    refuse(path, f"has tensors that can't be applied: {{}}; supported: {APPLIED}", unknown)
    refuse(path, "changes the same weights twice: {}; remove one of the two", again)
    refuse(path, "is damaged: it has {}; fetch it again", misshapen)
    refuse(
        path, "has NaN or Inf in {}; fetch it again or, if it was published like that, give another adapter", unhealthy
    )
    refuse(path, "is incomplete: its header counts {}; fetch it again", _find_missing(changes, metadata))
    if not changes and not prefixes and len(values) == sum(map(len, of_others.values())):
        wrong = f"changes only {', '.join(of_others)}; supported: changes of the transformer"
        raise InvalidRequest(f"adapter {path} {wrong if of_others else 'holds no tensors; fetch it again'}", "loras")
    with attribute_errors(path):
        if header_alpha and not config and not any("alpha" in change.tensors for change in changes.values()):
            config = {"lora_alpha": metadata.get("alpha")}
        pairs = {module: change for module, change in changes.items() if "down" in change.tensors}
        for module, change in pairs.items():
            change.gain = _compute_gain(module, change, config)
    for component, names in of_others.items():
        text = f"changes {component}, too ({len(names)} tensors, such as {names[0]}); these changes aren't applied"
        changes.warnings.append(f"adapter {path} {text}")
    root = 0.5 if config.get("use_rslora") else 1.0
    applied = {change.gain * len(change.tensors["down"]) ** root for change in pairs.values()}
    stated = metadata | ({"lora_alpha": config["lora_alpha"]} if "lora_alpha" in config else {})
    changes.warnings += [f"adapter {path} {text}" for text in list_unmet(stated, applied)]
    if (doubt := describe(path, metadata)) is not None:
        changes.warnings.append(f"adapter {path} {doubt}")
    return changes


def compute_checksum(changes: Mapping[str, ModuleChange]) -> str:
    """Return a checksum of what `read` returned: the same for the same content, wherever the file is."""
    digest = hashlib.sha256()
    for module, change in sorted(changes.items()):
        for part, value in sorted(change.tensors.items()):
            digest.update(repr((module, part, value.dtype, tuple(value.shape), change.gain)).encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def refuse(path: str, problem: str, names: list[str]) -> None:
    """Raise `InvalidRequest` if there are names; the first few of them replace the {} in `problem`."""
    if names:
        examples = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise InvalidRequest(f"adapter {path} {problem.format(examples)}", "loras")


def _describe_misfit(part: str, value: torch.Tensor) -> str | None:
    """Describe what a tensor should be, if no module could have it as that part; sizes are compared later."""
    if part == "alpha":
        return None if value.numel() == 1 else "one number"
    if not value.is_floating_point():
        return "floating-point numbers"
    if part in ("down", "up") and (value.ndim < 2 or 0 in value.shape):
        return "a matrix of at least one rank"
    return None if value.numel() else "a tensor that isn't empty"


def _find_missing(changes: Changes, metadata: Mapping[str, str]) -> list[str]:
    """Return the kinds of tensors of which FastVideo's header counts another number than the file has."""
    if metadata.get("format") != _FASTVIDEO:
        return []
    found = {
        kind: sum(part in change.names for change in changes.values() for part in parts)
        for kind, parts in _COUNTED.items()
    }
    stated = {kind: metadata[kind] for kind in found if kind in metadata}
    return [f"{count} {kind}, not {found[kind]}" for kind, count in stated.items() if count != str(found[kind])]


def _strip(name: str) -> str:
    """Return a tensor's name without what peft puts before it."""
    return name.removeprefix(_PEFT)


def _parse_name(name: str, prefixes: tuple[str, ...] = ()) -> tuple[str, str | None]:
    """Return a tensor's module and part; the part is None if no pattern matches."""
    name = name.replace(_COMPILED, "")
    for prefix in (*_PREFIXES, *prefixes):
        name = name.removeprefix(prefix)
    name = _FLAT_PREFIX.sub("", name)
    for part, pattern in _PARTS:
        if match := pattern.search(name):
            return name[: match.start()], part
    return name, None


def _read_config(file: AdapterFile) -> dict[str, Any]:
    """Read ranks and alpha from the header or from adapter_config.json; {} if there is neither."""
    text = read_metadata(file.weights).get("lora_adapter_metadata")
    config: Any = {}
    try:
        if text is not None:
            # diffusers puts the component before each name: {"transformer.lora_alpha": 16, ...}
            config = {name.partition(".")[2] or name: value for name, value in json.loads(text).items()}
        elif file.config is not None:
            config = dict(json.loads(file.config.read(0, file.config.size)))
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"its rank and alpha settings can't be read ({error!r}); fetch it again") from None
    if config.get("use_dora"):
        raise CheckpointError(
            "it is a DoRA adapter, which rescales whole rows of the merged weights; supported: LoRA without DoRA"
        )
    return dict(config)


def _compute_gain(module: str, change: ModuleChange, config: Mapping[str, Any]) -> float:
    """Return the factor of up @ down: alpha / rank, or alpha / sqrt(rank) if peft says so; one without an alpha."""
    rank = change.tensors["down"].shape[0]
    if "alpha" in change.tensors:
        return float(change.tensors["alpha"].float()) / rank
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"its alpha_pattern is {patterns!r}, not a table of numbers by module; fetch it again")
    pattern = next((key for key in patterns if _matches(key, module)), None)
    value = config.get("lora_alpha") if pattern is None else patterns[pattern]
    if value is None:
        return 1.0
    try:
        if not abs(alpha := float(value)) < _LARGEST_ALPHA:  # This is false for NaN, too.
            raise ValueError
    except (OverflowError, TypeError, ValueError):
        where = "lora_alpha" if pattern is None else f"alpha_pattern for {pattern}"
        raise CheckpointError(
            f"its {where}, which {change.names['down']} needs, is {value!r} instead of a number; fetch it again"
        ) from None
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
    except re.error as error:
        raise CheckpointError(
            f"its alpha_pattern has {pattern!r}, which isn't a valid regular expression ({error}); fetch it again"
        ) from None
