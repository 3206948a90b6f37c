"""Writes adapters for a torch module in the formats that are found in the wild, with random numbers."""

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
    found = {}
    for name in names:
        outputs, inputs = module.get_submodule(name).weight.shape[:2]
        down = random.standard_normal((rank, inputs)) / np.sqrt(inputs)
        up = scale * random.standard_normal((outputs, rank)) / np.sqrt(rank)
        found[name] = torch.tensor(down, dtype=torch.float32), torch.tensor(up, dtype=torch.float32)
    return found


def named(made, names, prefix, down="lora_down", up="lora_up", *, alpha=None, underscores=False):
    """Return a file's tensors; names: what each module is called there."""
    tensors = {}
    for own, (one, other) in made.items():
        name = names[own].replace(".", "_") if underscores else names[own]
        tensors[f"{prefix}{name}.{down}.weight"] = one
        tensors[f"{prefix}{name}.{up}.weight"] = other
        if alpha is not None:
            tensors[f"{prefix}{name}.alpha"] = torch.tensor(float(alpha))
    return tensors


def save(tensors, path, metadata=None):
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata=metadata)
    return str(path)


def by_hand(state, made, gain):
    """Return a module's state dict with gain * up @ down added in float64."""
    changed = dict(state)
    for name, (down, up) in made.items():
        weight = state[f"{name}.weight"]
        product = (up.double() @ down.double().flatten(1)).reshape(weight.shape)
        changed[f"{name}.weight"] = (weight.double() + gain * product).float()
    return changed
