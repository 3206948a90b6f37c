"""Adapters that can't be applied are refused by the name of what is wrong, whatever their files hold."""

import contextlib
import json
import random

import numpy as np
import pytest
import torch

from tests.wan_tpu import adapter_files as files
from tests.wan_tpu.adapter_weights import KIND, merge_weights
from wan_tpu import GenerationRequest
from wan_tpu.adapters.adapter import Targets
from wan_tpu.adapters.files import read
from wan_tpu.adapters.location import find
from wan_tpu.errors import InvalidRequest


def refusal(pipeline, tensors, tmp_path, metadata=None):
    path = files.save(tensors, tmp_path / "bad.safetensors", metadata)
    with pytest.raises(InvalidRequest) as raised:
        merge_weights(pipeline(KIND), "denoise_high", path)
    assert raised.value.field == "loras"
    return str(raised.value)


@pytest.mark.parametrize(
    "name",
    [
        "diffusion_model.blocks.0.self_attn.q.dora_scale",
        "diffusion_model.blocks.0.self_attn.q.hada_w1_a",
        "diffusion_model.blocks.0.self_attn.q.lokr_w1",
        "diffusion_model.blocks.0.self_attn.q.lora_mid.weight",
        "diffusion_model.blocks.0.self_attn.v.alpha",
        "diffusion_model.blocks.0.self_attn.v.lora_down.weight",
        "diffusion_model.blocks.0.self_attn.v.lora_up.weight",
    ],
)
def test_what_isnt_understood_is_refused_by_name(name, good, pipeline, tmp_path):
    assert name in refusal(pipeline, good | {name: torch.ones(4, 48)}, tmp_path)


def test_other_models_are_refused_by_name(good, pipeline, tmp_path):
    far = {name.replace("blocks.0", "blocks.30"): value for name, value in good.items()}
    message = refusal(pipeline, far, tmp_path)
    assert "diffusion_model.blocks.30.self_attn.q.lora_down.weight" in message and "another model" in message
    wide = {name: torch.cat([value, value]) if "up" in name else value for name, value in good.items()}
    message = refusal(pipeline, wide, tmp_path)
    assert "blocks.0.self_attn.q.lora_up.weight [96, 4]" in message and "[48, 48]" in message
    message = refusal(pipeline, good | {"diffusion_model.patch_embedding.diff": torch.ones(48, 99, 1, 2, 2)}, tmp_path)
    assert "patch_embedding.diff [48, 99, 1, 2, 2]" in message


def test_damaged_files_are_refused(good, pipeline, tmp_path):
    name = "diffusion_model.blocks.0.self_attn.q.lora_up.weight"
    assert f"NaN or Inf in {name}; fetch it again or, if it was" in refusal(
        pipeline, good | {name: good[name] * float("nan")}, tmp_path
    )
    own = "transformer.blocks.0.attn1.to_q"
    again = {f"{own}.lora_A.weight": torch.ones(4, 48), f"{own}.lora_B.weight": torch.ones(48, 4)}
    assert "twice" in refusal(pipeline, good | again, tmp_path)
    assert "DoRA" in refusal(pipeline, good, tmp_path, {"lora_adapter_metadata": '{"transformer.use_dora": true}'})
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((tmp_path / "bad.safetensors").read_bytes()[:-5])
    with pytest.raises(InvalidRequest):
        merge_weights(pipeline(KIND), "denoise_high", str(cut))
    for path, message in ((str(tmp_path), "choose one of them"), ("/nowhere/x.safetensors", "check the path")):
        with pytest.raises(InvalidRequest, match=message):
            merge_weights(pipeline(KIND), "denoise_high", path)


Q = "diffusion_model.blocks.0.self_attn.q"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (f"{Q}.lora_down.weight", torch.zeros(0, 48)),
        (f"{Q}.lora_up.weight", torch.zeros(48, 0)),
        (f"{Q}.lora_down.weight", torch.ones(48)),
        (f"{Q}.lora_up.weight", torch.ones(48)),
        (f"{Q}.lora_down.weight", torch.tensor(1.0)),
        (f"{Q}.lora_down.weight", torch.ones(4, 48, dtype=torch.bool)),
        (f"{Q}.alpha", torch.zeros(0)),
        (f"{Q}.alpha", torch.ones(4)),
        ("diffusion_model.patch_embedding.diff_b", torch.tensor(1.0)),
        ("diffusion_model.patch_embedding.diff_b", torch.zeros(0)),
    ],
)
def test_tensors_of_impossible_shapes_are_refused_by_name(name, value, good, pipeline, tmp_path):
    assert name in refusal(pipeline, good | {name: value}, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (f"{Q}.lora_down.weight", torch.ones(4, 48, dtype=torch.int8)),
        (f"{Q}.lora_down.weight", torch.ones(2, 48, dtype=torch.uint8)),
        (f"{Q}.scale_weight", torch.tensor(0.5)),
        (f"{Q}.lora_down.weight.absmax", torch.ones(3)),
        ("scaled_fp8", torch.zeros(0)),
    ],
)
def test_quantised_adapters_are_refused_with_what_works(name, value, good, pipeline, tmp_path):
    message = refusal(pipeline, good | {name: value}, tmp_path)
    assert f"holds quantised weights ({name})" in message
    assert "the same adapter in bfloat16" in message and "fetch it again" not in message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lora_alpha": "much"}, "is 'much' instead of a number"),
        ({"lora_alpha": [8]}, r"is [8] instead of a number"),
        ({"lora_alpha": float("inf")}, "is inf instead of a number"),
        ({"lora_alpha": 8, "alpha_pattern": {"self_attn(": 4}}, "'self_attn(', which isn't a valid regular"),
        ({"lora_alpha": 8, "alpha_pattern": {"self_attn.q": None, "ffn.2": 4}}, ""),
        ({"lora_alpha": 8, "alpha_pattern": {"self_attn.q": {}}}, f"{Q}.lora_down.weight needs, is {{}} instead"),
        ({"lora_alpha": 8, "alpha_pattern": ["self_attn.q"]}, "alpha_pattern is ['self_attn.q']"),
        ("[" * 100_000, "alpha settings can't be read"),
    ],
)
def test_impossible_alphas_of_a_configuration_are_refused(config, message, good, pipeline, tmp_path):
    pairs = {name: value for name, value in good.items() if not name.endswith("alpha")}
    path = files.save(pairs, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if not message:  # null is as good as nothing
        merge_weights(pipeline(KIND), "denoise_high", path)
        return
    with pytest.raises(InvalidRequest) as raised:
        merge_weights(pipeline(KIND), "denoise_high", path)
    assert message in str(raised.value)
    assert raised.value.field == "loras"


def test_made_up_files_are_read_or_refused_whole(pipeline, tmp_path):
    """Whatever stands in a file: `InvalidRequest`, or finite numbers."""
    runtime = pipeline(KIND).runtime
    targets = Targets(runtime.model.components["denoise_high"], runtime.component("denoise_high"))
    read_whole = 0
    for seed in range(120):
        path = files.save_made_up(tmp_path / "x.safetensors", random.Random(seed))
        with contextlib.suppress(InvalidRequest):
            adapter = targets.adapter(path, read(find(path), path))
            read_whole += 1
            gains = [factors.gain for factors in adapter.factors.values()]
            assert all(np.isfinite(array).all() for array in (*gains, *adapter.differences.values())), seed
    assert 5 < read_whole < 100


@pytest.mark.parametrize(
    ("loras", "message"),
    [
        ([{"path": "a", "scale": float("nan")}], "number"),
        (["a:99"], "nearest 10"),
        (["a@middle"], "high, low, refine, both"),
        ([{"path": "a", "strength": 1}], "strength"),
        ([{}], "no path"),
        ([3], "int"),
        ("a.safetensors", "list"),
        (["a"] * 9, "allowed: at most 8"),
    ],
)
def test_requests_with_impossible_adapters_are_refused(loras, message):
    with pytest.raises(InvalidRequest, match=message) as raised:
        GenerationRequest(loras=loras)
    assert raised.value.field == "loras"


def test_a_model_of_one_expert_has_no_high_one(pipeline):
    with pytest.raises(InvalidRequest, match="@high"):
        pipeline("wan2.1-t2v-1.3b").plan(GenerationRequest(loras=["a@high"]))
