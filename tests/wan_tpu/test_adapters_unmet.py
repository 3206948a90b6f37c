"""What an adapter's file asks for without getting it is a warning of the request."""

import contextlib
import dataclasses

import diffusers
import numpy as np
import pytest
import torch

from tests.wan_tpu import adapter_files as files
from tests.wan_tpu.adapter_weights import KIND, merge_weights, request
from wan_tpu import GenerationRequest
from wan_tpu.adapters.checking import check
from wan_tpu.adapters.files import read
from wan_tpu.adapters.location import find
from wan_tpu.errors import InvalidRequest
from wan_tpu.families import published_spec
from wan_tpu.requested_adapter import parse_adapter
from wan_tpu.runtime.runtime import list_adapter_warnings

PAIR = {"x.lora_A.weight": torch.ones(4, 8), "x.lora_B.weight": torch.ones(8, 4)}
ALPHA = PAIR | {"x.alpha": torch.tensor(2.0)}


@pytest.mark.parametrize(
    ("tensors", "metadata", "about"),
    [
        (PAIR, None, []),
        (PAIR, {"alpha": "4", "ss_network_alpha": "4", "format": "pt"}, []),  # It is the rank, as without an alpha.
        (ALPHA, {"ss_network_alpha": "2.0", "ss_scale_weight_norms": "3"}, []),
        (PAIR, {"alpha": "8"}, ["alpha 8"]),
        (ALPHA, {"ss_network_alpha": "4"}, ["ss_network_alpha 4"]),
        (ALPHA, {"lora_adapter_metadata": '{"transformer.lora_alpha": 16}'}, ["lora_alpha 16"]),
        (PAIR, {"lora_adapter_metadata": '{"transformer.lora_alpha": 16}', "alpha": "8"}, ["alpha 8"]),
        (PAIR, {"lora_adapter_metadata": '{"transformer.lora_alpha": 16}', "alpha": "16"}, []),
        (PAIR, {"lora_scale": "1.0"}, []),
        (PAIR, {"lora_scale": "0.5"}, ["lora_scale 0.5"]),
        (PAIR | {"transformer_ref.a.lora_A.weight": torch.ones(4, 8)}, None, ["transformer_ref"]),
        (PAIR | {"lora_te_a_b.lora_down.weight": torch.ones(4, 8)}, None, ["lora_te"]),
    ],
)
def test_wishes_of_a_file_that_are_not_met_are_named(tensors, metadata, about, tmp_path):
    path = files.save(tensors, tmp_path / "a.safetensors", metadata)
    warnings = read(find(path), path).warnings
    assert len(warnings) == len(about)
    for warning, text in zip(warnings, about, strict=True):
        assert path in warning and text in warning


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reference_downscale_factor", "1"),
        ("reference_temporal_scale_factor", "2"),
        ("ss_reference_downscale_factor", "2"),
        ("ss_ic_lora_strategy", "audio_ref_only_ic"),
        ("ss_v2v_training", "True"),
        ("reference_token_order", "prepend"),
        ("reference_slot_embedding_type", "fourier_mlp"),
    ],
)
def test_adapter_that_was_trained_with_a_reference_is_refused(key, value, tmp_path):
    path = files.save(PAIR, tmp_path / "a.safetensors", {key: value})
    with pytest.raises(InvalidRequest, match=rf"{key} {value}.*reference video") as refusal:
        read(find(path), path)
    assert refusal.value.field == "loras"


@pytest.mark.parametrize(("key", "value"), [("ss_ic_lora_strategy", "none"), ("ss_v2v_training", "False")])
def test_adapter_that_was_trained_without_a_reference_is_read(key, value, tmp_path):
    path = files.save(PAIR, tmp_path / "a.safetensors", {key: value})
    assert read(find(path), path).warnings == []


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [("ltx-2.5-22b-ic-lora-pixel-spatial-upscaler-x2-1.0.safetensors", True), ("IC_LoRA.safetensors", True),
     ("magic-lora.safetensors", False)],
)  # fmt: skip
def test_adapter_of_ltx_2_whose_name_says_that_it_is_in_context_is_refused(name, is_refused):
    request = GenerationRequest(prompt="A cat", loras=[f"adapters/{name}"])
    with pytest.raises(InvalidRequest, match="reference video") if is_refused else contextlib.nullcontext():
        published_spec("ltx-2.5-distilled").plan(request)


@pytest.mark.parametrize(
    ("name", "header", "is_in_doubt"),
    [
        ("magic.safetensors", None, True),
        ("magic.safetensors", {"ss_network_dim": "4"}, True),
        ("style-distilled-lora.safetensors", None, True),
        ("magic.safetensors", {"ss_lora_target_preset": "t2v"}, False),
        ("ltx-2.5-22b-distilled-lora-450-bf16.safetensors", None, False),
        ("ltx-2-19b-lora-camera-control-dolly-in.safetensors", None, False),
    ],
)
def test_adapter_of_ltx_2_that_may_be_in_context_has_a_warning(
    name, header, is_in_doubt, checkpoint, pipeline, tmp_path
):
    """It is made for a run, and where a command or a service checks its files."""
    folder = checkpoint("ltx-2.3-distilled")
    module = diffusers.LTX2VideoTransformer3DModel.from_pretrained(folder / "transformer")
    names = {"transformer_blocks.0.attn1.to_q": "transformer_blocks.0.attn1.to_q"}
    tensors = files.name_tensors(files.factors(module, names), names, "diffusion_model.", "lora_A", "lora_B")
    adapter = parse_adapter(files.save(tensors, tmp_path / name, header))
    fetched = pipeline("ltx-2.3-distilled").runtime.fetch_adapters([adapter], ["denoise", "refine"])
    warnings = list_adapter_warnings(fetched)
    assert [adapter.path in text and "reference video" in text for text in warnings] == [True] * is_in_doubt
    assert check(str(folder), [adapter])[adapter.path] == tuple(warnings)


def test_file_for_another_component_alone_is_refused_by_its_name(tmp_path):
    tensors = {"text_encoder.a.lora_A.weight": torch.ones(4, 8), "text_encoder.a.lora_B.weight": torch.ones(8, 4)}
    path = files.save(tensors, tmp_path / "a.safetensors")
    with pytest.raises(InvalidRequest, match="text_encoder"):
        read(find(path), path)


def test_warnings_of_adapters_reach_the_request(pipeline, transformer, tmp_path):
    names = files.blocks(transformer, files.WAN)
    tensors = files.name_tensors(files.factors(transformer, names), names, "diffusion_model.", alpha=4)
    path = files.save(tensors, tmp_path / "a.safetensors", {"lora_scale": "0.5"})
    pipe, warnings = pipeline(KIND), []
    run = pipe.make_executor(pipe.plan(request(loras=[path], steps=2)), warn=warnings.append)
    for _ in run.work(stop=1):
        pass
    assert [warning for warning in warnings if "lora_scale" in warning] == warnings != []


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [pytest.param("ltx-2.3-distilled", marks=pytest.mark.thorough), "ltx-2"])
def test_part_for_ltx2_s_connectors_is_applied_there_as_diffusers_does(kind, checkpoint, pipeline, tmp_path):
    """One file changes the transformer and the projections of the text; LTX-2.0 has a single one for both streams."""
    pipe = diffusers.LTX2Pipeline.from_pretrained(checkpoint(kind))
    names = {name: name for name in ("transformer_blocks.0.attn1.to_q", "transformer_blocks.1.ff.net.2")}
    pairs = files.factors(pipe.transformer, names)
    tensors = files.name_tensors(pairs, names, "diffusion_model.", "lora_A", "lora_B")
    projections = {
        name: name.replace("text_proj_in", "aggregate_embed")
        for name, _ in pipe.connectors.named_children()
        if name.endswith("text_proj_in")
    }
    of_connectors = files.factors(pipe.connectors, projections, scale=3.0)
    tensors |= files.name_tensors(of_connectors, projections, "text_embedding_projection.", "lora_A", "lora_B")
    path = files.save(tensors, tmp_path / "ltx2.safetensors")
    expected = files.by_hand(pipe.transformer.state_dict(), pairs, 1.0)
    got = merge_weights(pipeline(kind), "denoise", path)
    for name, value in expected.items():
        assert (got[name] - value).abs().max() <= 1e-5 * value.abs().max(), name
    assert read(find(path), path, beside=("text_embedding_projection.",)).warnings == []

    pipe.load_lora_weights(path)
    with torch.no_grad():
        states, mask, _, _ = pipe.encode_prompt("A cat in the rain.", do_classifier_free_guidance=False)
        video, audio, _ = pipe.connectors(states, mask, padding_side=pipe.tokenizer.padding_side)
    ours, sizes = pipeline(kind), {"height": 64, "width": 128, "frames": 9}
    plain = GenerationRequest(prompt="A cat in the rain.", **sizes)
    before = ours.encode(ours.plan(plain)).prompt
    adapted = ours.encode(ours.plan(dataclasses.replace(plain, loras=[path]))).prompt
    for name, reference in (("text", video), ("audio_text", audio)):
        assert np.abs(adapted[name] - reference.numpy()).max() <= 1e-5 * np.abs(reference.numpy()).max()
        assert np.abs(adapted[name] - before[name]).max() > 1e-2 * np.abs(before[name]).max()
    again = ours.encode(ours.plan(plain)).prompt
    assert all(np.array_equal(again[name], value) for name, value in before.items())  # The base again, to the bit.
