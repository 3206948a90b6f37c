"""A host that encodes prompts applies what a request's adapters change of its components, and says what is left out."""

import diffusers
import numpy as np
import pytest

from actors.slices.payloads import unpack
from actors.slices.stage_host import StageHost
from tests.wan_tpu import adapter_files as files
from wan_tpu import GenerationRequest, load_pipeline
from wan_tpu.errors import Unavailable

SIZE = {"height": 64, "width": 128, "frames": 9}


@pytest.fixture(scope="module")
def path(checkpoint, tmp_path_factory):
    """Return an adapter of LTX-2's connectors, whose header asks for reference images."""
    pipe = diffusers.LTX2Pipeline.from_pretrained(checkpoint("ltx-2.3-distilled"))
    names = {name: name.replace("text_proj_in", "aggregate_embed") for name in ("video_text_proj_in",)}
    pairs = files.factors(pipe.connectors, names, scale=3.0)
    tensors = files.name_tensors(pairs, names, "text_embedding_projection.", "lora_A", "lora_B")
    folder = tmp_path_factory.mktemp("adapter")
    return files.save(tensors, folder / "text.safetensors", {"lora_scale": "0.5"})


@pytest.mark.long
def test_prompt_is_encoded_with_the_adapter_that_was_fetched_and_only_with_it(checkpoint, path):
    folder = checkpoint("ltx-2.3-distilled")
    pipe = load_pipeline(folder, dtype="float32", mesh=(1, 1, 1))
    plain = pipe.plan(GenerationRequest(prompt="a cat", **SIZE))
    adapted = pipe.plan(GenerationRequest(prompt="a cat", loras=[path], **SIZE))
    assert (plain.adapts_text, adapted.adapts_text) == (False, True)
    host, text = StageHost(str(folder), ("encoder",), (1, 1, 1), "float32"), plain.describe_text("a cat")
    before = unpack(host.encode_text(text).payload).values
    host.fetch_text_adapters(adapted)
    values = unpack(host.encode_text(text, adapted).payload).values
    for name, value in pipe.encode(adapted).prompt.items():
        assert np.array_equal(values[name], value)
    assert not np.array_equal(values["text"], before["text"])
    assert np.array_equal(values["audio_text"], before["audio_text"])
    assert np.array_equal(unpack(host.encode_text(text).payload).values["text"], before["text"])
    with pytest.raises(Unavailable):  # It was taken.
        host.encode_text(text, adapted)


def test_host_that_denoises_says_what_a_file_asks_for_in_vain(checkpoint, path):
    folder = checkpoint("ltx-2.3-distilled")
    plan = load_pipeline(folder, dtype="float32", mesh=(1, 1, 1)).plan(
        GenerationRequest(prompt="a cat", loras=[path], **SIZE)
    )
    host = StageHost(str(folder), ("denoise", "refine"), (1, 1, 1), "float32")
    wish, doubt = host.fetch_adapters(plan)
    assert "lora_scale" in wish and "IC-LoRA" in doubt
