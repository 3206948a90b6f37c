"""Requests with adapters, and the weights of an expert with adapters applied, as diffusers has them."""

import re

import numpy as np
import torch

from wan_tpu import GenerationRequest
from wan_tpu.requested_adapter import parse_adapter
from wan_tpu.runtime.bridge import ScannedBlocks

RELATIVE = 1e-5  # to the largest value: float32 rounding of a merged weight, and what six steps make of it
KIND = "wan2.2-t2v-a14b"


def merge_weights(pipe, stage, *loras):
    """Return an expert's weights with adapters applied, under diffusers' names and in its order of rows."""
    runtime = pipe.runtime
    loaded = runtime.component(stage, tuple(map(parse_adapter, loras)))
    component = runtime.model.components[stage]
    depths = {path: m.depth for path, m in loaded.module.named_modules() if isinstance(m, ScannedBlocks)}
    weights = {}
    for name in dict(loaded.module.named_parameters()):
        value = np.asarray(loaded.params[name])
        path = next((path for path in depths if name.startswith(f"{path}.template.")), None)
        rest = name if path is None else name.removeprefix(f"{path}.template.")
        plain = name if path is None else f"{path}.*.{rest}"
        change = next((change for pattern, change in component.changes if re.fullmatch(pattern, plain)), None)
        for i in range(1 if path is None else depths[path]):
            layer = value if path is None else value[i]
            if change is not None:  # turned back: where did each row come from?
                order = change(np.arange(len(layer)))
                layer = layer[np.argsort(order)]
            weights[name if path is None else f"{path}.{i}.{rest}"] = torch.tensor(layer)
    return weights


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert (got[name] - value).abs().max() <= RELATIVE * value.abs().max(), name


def request(**more):
    settings = {"height": 64, "width": 96, "frames": 9, "steps": 4, "guidance_scale": 1.0, "shift": 5.0}
    return GenerationRequest(prompt="a cat", **settings | more)
