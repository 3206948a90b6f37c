"""Writes adapters for a torch module in the formats that are found in the wild, with random numbers."""

import json
import math

import numpy as np
import torch
from safetensors.torch import save_file

# Names that Wan's own files have, written out for one layer: what the converters of others turn into diffusers'.
WAN = {
    "attn1.to_q": "self_attn.q",
    "attn1.to_k": "self_attn.k",
    "attn1.to_v": "self_attn.v",
    "attn1.to_out.0": "self_attn.o",
    "attn2.to_q": "cross_attn.q",
    "attn2.to_k": "cross_attn.k",
    "attn2.to_v": "cross_attn.v",
    "attn2.to_out.0": "cross_attn.o",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
WAN_IMAGE = {"attn2.add_k_proj": "cross_attn.k_img", "attn2.add_v_proj": "cross_attn.v_img"}
WAN_OUTER = {
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "proj_out": "head.head",
}


def blocks(module, names):
    """Return all layers' modules of these names: own name -> original."""
    depth = len(module.blocks)
    return {f"blocks.{i}.{own}": f"blocks.{i}.{original}" for i in range(depth) for own, original in names.items()}


def factors(module, names, rank=4, seed=0, scale=0.3):
    """Return (down [R, I], up [O, R]) of linear layers by name, as large as their effect should be."""
    random = np.random.default_rng(seed)
    pairs = {}
    for name in names:
        outputs, inputs = module.get_submodule(name).weight.shape[:2]
        down = random.standard_normal((rank, inputs)) / np.sqrt(inputs)
        up = scale * random.standard_normal((outputs, rank)) / np.sqrt(rank)
        pairs[name] = torch.tensor(down, dtype=torch.float32), torch.tensor(up, dtype=torch.float32)
    return pairs


def name_tensors(pairs, names, prefix, down="lora_down", up="lora_up", *, alpha=None, underscores=False):
    """Return a file's tensors; names: what each module is called there."""
    tensors = {}
    for own, (lower, upper) in pairs.items():
        name = names[own].replace(".", "_") if underscores else names[own]
        tensors[f"{prefix}{name}.{down}.weight"] = lower
        tensors[f"{prefix}{name}.{up}.weight"] = upper
        if alpha is not None:
            tensors[f"{prefix}{name}.alpha"] = torch.tensor(float(alpha))
    return tensors


def save(tensors, path, metadata=None):
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata=metadata)
    return str(path)


def by_hand(state, pairs, gain):
    """Return a module's state dict with gain * up @ down added in float64."""
    changed = dict(state)
    for name, (down, up) in pairs.items():
        weight = state[f"{name}.weight"]
        product = (up.double() @ down.double().flatten(1)).reshape(weight.shape)
        changed[f"{name}.weight"] = (weight.double() + gain * product).float()
    return changed


_MODULES = [
    "blocks.0.self_attn.q",
    "blocks.1.ffn.2",
    "blocks_1_attn1_to_k",
    "patch_embedding",
    "head.head",
    "blocks.9.x",
    "",
]
_LEAVES = [
    "lora_down.weight",
    "lora_up.weight",
    "lora_A",
    "lora_B.default.weight",
    "lora_B.bias",
    "alpha",
    "diff",
    "diff_b",
]
_LEAVES += ["diff_m", "dora_scale", "hada_w1_a", "w_norm", "weight"]
_SHAPES = [
    [],
    [0],
    [1],
    [48],
    [4, 48],
    [48, 4],
    [0, 48],
    [48, 0],
    [96, 4],
    [4, 96],
    [4, 48, 1, 1],
    [1, 1, 48],
    [1] * 70,
]
_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "I8": 1, "BOOL": 1, "F4": 1, "": 1}
_VALUES = [
    None,
    True,
    0,
    -1,
    8,
    "8",
    "x",
    [],
    {},
    {"q": 4},
    {"(": 4},
    {"": None},
    {"q": "x"},
    1e300,
    math.nan,
    math.inf,
    "\ud800",
]


def save_made_up(path, random):
    """Write a file that is nearly an adapter: pairs that fit, and a few tensors, fields and bytes of any kind."""
    tensors = {}
    for module in random.sample(["blocks.0.self_attn.q", "blocks.1.self_attn.v", "blocks.0.cross_attn.o"], 2):
        for leaf, shape in (("lora_down.weight", [4, 48]), ("lora_up.weight", [48, 4]), ("alpha", [])):
            tensors[f"diffusion_model.{module}.{leaf}"] = shape, "F32"
    for _ in range(random.choice([0, 0, 1, 3])):
        prefix = random.choice(["diffusion_model.", "lora_unet_", "transformer.", ""])
        name = f"{prefix}{random.choice(_MODULES)}.{random.choice(_LEAVES)}"
        tensors[name] = random.choice(_SHAPES), random.choice(list(_DTYPES)) if random.random() < 0.5 else "F32"
    if random.random() < 0.2:
        tensors.pop(random.choice(list(tensors)))
    header, data = {}, b""
    for name, (shape, dtype) in tensors.items():
        numbers = np.full(math.prod(shape), random.choice([0.5, 1, 1e30, np.nan] if random.random() < 0.2 else [0.5]))
        size = len(numbers) * _DTYPES[dtype]
        content = numbers.astype(np.float32).tobytes() if dtype == "F32" else random.randbytes(size)
        fields = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
        if random.random() < 0.02:
            fields[random.choice(list(fields))] = random.choice(_VALUES)
        header[name], data = fields, data + content
    settings = {
        key: random.choice(_VALUES)
        for key in ("lora_alpha", "alpha_pattern", "use_rslora", "use_dora")
        if random.random() < 0.2
    }
    config = path.with_name("adapter_config.json")
    config.unlink(missing_ok=True)
    if random.random() < 0.3:
        header["__metadata__"] = {
            "lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in settings.items()})
        }
    elif random.random() < 0.1:
        header["__metadata__"] = random.choice(
            [None, [], {"lora_adapter_metadata": 3}, {"lora_adapter_metadata": "[]"}]
        )
    elif random.random() < 0.5:
        config.write_text(json.dumps(random.choice([settings, settings, settings, *_VALUES])))
    encoded = json.dumps(header).encode()
    content = bytearray(len(encoded).to_bytes(8, "little") + encoded + data)
    if random.random() < 0.15:
        content[random.randrange(len(encoded) + 8)] = random.randrange(256)
    if random.random() < 0.05:
        del content[random.randrange(len(content)) :]
    path.write_bytes(content)
    return str(path)
