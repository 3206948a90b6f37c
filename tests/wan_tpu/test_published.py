"""Programs of others that foresight.py builds again: rules of sharding name weights of the model, flags are read."""

import re

import diffusers
import pytest
import torch

from scripts.published import maxdiffusion_steps
from scripts.published.torchax_steps import COGVIDEOX, HUNYUAN, WAN
from wan_tpu.families.cogvideox.published import TRANSFORMER_15
from wan_tpu.families.hunyuan15.published import PUBLISHED
from wan_tpu.families.wan.published import TRANSFORMER_14B


@pytest.mark.parametrize(
    ("kind", "config", "shardings", "whole"),
    [
        (diffusers.WanTransformer3DModel, TRANSFORMER_14B, WAN, {"patch_embedding", "proj_out"}),
        (diffusers.CogVideoXTransformer3DModel, TRANSFORMER_15, COGVIDEOX, {"patch_embed.proj", "ff.net.0.proj"}),
        (
            diffusers.HunyuanVideo15Transformer3DModel,
            PUBLISHED["hunyuanvideo1.5-720p-t2v"].transformer,
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


def test_flags_are_read_from_the_script_of_a_checkout(tmp_path):
    script = tmp_path / "end_to_end" / "tpu" / "run_wan_fast_inference.sh"
    script.parent.mkdir(parents=True)
    script.write_text('set -u\nexport LIBTPU_INIT_ARGS="--xla_a=true --xla_b=65536 --xla_c=ENABLED"\n')
    flags = maxdiffusion_steps.flags(tmp_path)
    assert {name: flags[name] for name in ("xla_a", "xla_b", "xla_c")} == {
        "xla_a": True,
        "xla_b": "65536",
        "xla_c": "ENABLED",
    }
    assert flags["xla_tpu_enable_sparse_core_async_all_to_all"] is False  # or its schedule can't be read
    script.write_text("set -u\n")
    with pytest.raises(ValueError, match="no flags of libtpu"):
        maxdiffusion_steps.flags(tmp_path)
