"""Shared by the tests of adapters."""

import diffusers
import pytest

from tests.wan_tpu import adapter_files as files
from tests.wan_tpu.adapter_weights import KIND


@pytest.fixture(scope="session")
def transformer(checkpoint):
    return diffusers.WanTransformer3DModel.from_pretrained(checkpoint(KIND), subfolder="transformer")


@pytest.fixture
def good(transformer):
    names = {"blocks.0.attn1.to_q": "blocks.0.self_attn.q", "blocks.1.ffn.net.2": "blocks.1.ffn.2"}
    return files.name_tensors(files.factors(transformer, names), names, "diffusion_model.", alpha=4)
