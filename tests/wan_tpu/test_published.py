"""Programs of others that foresight.py builds again: every rule of their sharding names weights of the model."""

import re

import diffusers
import pytest
import torch

from scripts.published.torchax_steps import COGVIDEOX, HUNYUAN, WAN
from wan_tpu.families.cogvideox.presets import TRANSFORMER_15
from wan_tpu.families.hunyuan15.presets import PRESETS
from wan_tpu.families.wan.presets import TRANSFORMER_14B


@pytest.mark.parametrize(
    ("kind", "config", "shardings", "whole"),
    [
        (diffusers.WanTransformer3DModel, TRANSFORMER_14B, WAN, {"patch_embedding", "proj_out"}),
        (diffusers.CogVideoXTransformer3DModel, TRANSFORMER_15, COGVIDEOX, {"patch_embed.proj", "ff.net.0.proj"}),
        (
            diffusers.HunyuanVideo15Transformer3DModel,
            PRESETS["hunyuanvideo1.5-720p-t2v"].transformer,
            HUNYUAN,
            {"attn.to_out", "to_add_out", "ff.net.2", "ff_context.net.2"},
        ),
    ],
)
def test_rules_of_a_sharding_name_weights(kind, config, shardings, whole):
    with torch.device("meta"):
        names = [name for name, _ in kind.from_config(config | {"num_layers": 1}).named_parameters()]
    assert all(any(re.fullmatch(rule, name) for name in names) for rule in shardings)
    unsharded = [name for name in names if not any(re.fullmatch(rule, name) for rule in shardings)]
    assert all(any(part in name for name in unsharded) for part in whole)
