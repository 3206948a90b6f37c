"""Checkpoints are read whole or refused by name."""

import gzip
import json
import shutil
import subprocess
import sys

import diffusers
import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import torch
from huggingface_hub._local_folder import get_local_download_paths
from huggingface_hub.utils import filter_repo_objects

from tests.conftest import ROOT
from wan_tpu import CheckpointError, GenerationRequest, load_pipeline
from wan_tpu.checkpoint import Checkpoint, on_disk
from wan_tpu.families.model import open_model
from wan_tpu.families.shared.tokenizing import Tokenizer
from wan_tpu.runtime.component_files import index_tensors
from wan_tpu.runtime.tensor_files import locate_tensors
from wan_tpu.tiny import make_checkpoint

KIND = "wan2.2-i2v-a14b"
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint(KIND), tmp_path / "copy")


def load_high(folder):
    return load_pipeline(folder, dtype="float32", mesh=(1, 1, 1)).runtime.component("denoise_high")


def edit(file, change):
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("blocks.1.attn1.to_q.weight"), r"transformer.*blocks\.1\.attn1\.to_q\.weight"),
        (lambda t: t.update({"blocks.9.surprise": torch.zeros(1)}), r"blocks\.9\.surprise"),
        (lambda t: t.update({"proj_out.bias": torch.zeros(3)}), r"proj_out\.bias \[3\].*\[64\]"),
    ],
    ids=["missing", "not of the model", "of another shape"],
)
def test_tensor_that_is_wrong_is_named(change, message, copy):
    edit(copy / "transformer" / WEIGHTS, change)
    with pytest.raises(CheckpointError, match=message):
        load_high(copy)


def test_truncated_file_is_refused(copy):
    file = copy / "transformer" / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="damaged"):
        load_high(copy)


def test_pickles_are_not_read(copy):
    (copy / "transformer" / WEIGHTS).rename(copy / "transformer" / "diffusion_pytorch_model.bin")
    interrupt_download(copy, "vae/other.safetensors")  # An interrupted download isn't why it can't be read.
    with pytest.raises(CheckpointError, match="save_pretrained"):
        load_high(copy)


def interrupt_download(folder, name):
    """Leave what `hf download --local-dir` has of a file before it is complete."""
    paths = get_local_download_paths(folder, name)
    paths.incomplete_path("etag").write_bytes(b"half")
    (folder / name).unlink(missing_ok=True)


@pytest.mark.parametrize("sharded", [False, True])
def test_interrupted_download_of_weights_is_to_be_continued(sharded, copy):
    name = WEIGHTS
    if sharded:
        name = "diffusion_pytorch_model-00001-of-00002.safetensors"
        index = {"weight_map": {"proj_out.bias": name, "proj_out.weight": name.replace("00001", "00002")}}
        (copy / "transformer" / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
        (copy / "transformer" / WEIGHTS).unlink()
    interrupt_download(copy, f"transformer/{name}")
    with pytest.raises(CheckpointError, match="`hf download`") as refused:
        load_high(copy)
    assert "save_pretrained" not in str(refused.value)


@pytest.mark.parametrize("name", ["model_index.json", "transformer/config.json"])
def test_interrupted_download_of_small_files_is_to_be_continued(name, copy):
    interrupt_download(copy, name)
    with pytest.raises(CheckpointError, match="`hf download`"):
        load_high(copy)


def test_interrupted_download_into_the_hub_s_cache_is_to_be_continued(copy, tmp_path):
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123"
    shutil.copytree(copy, snapshot)
    (snapshot / "transformer" / WEIGHTS).unlink()
    (snapshot.parent.parent / "blobs").mkdir()
    with pytest.raises(CheckpointError, match="`hf download`"):
        load_high(snapshot)


def test_sharded_files_equal_one_file(copy):
    whole = load_high(copy).params
    folder = copy / "transformer"
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"diffusion_pytorch_model-0000{i + 1}-of-00002.safetensors"
        safetensors.torch.save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    sharded = load_high(copy).params
    assert set(sharded) == set(whole)
    assert all(np.array_equal(sharded[name], whole[name]) for name in whole)
    (folder / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors"):
        load_high(copy)


def test_stray_files_beside_the_weights_are_left_alone(copy):
    """An average of the weights, an older file, another precision: none is named as diffusers names its own."""
    folder = copy / "transformer"
    expected = np.asarray(load_high(copy).params["proj_out.bias"])
    for stray in ("ema.safetensors", "diffusion_pytorch_model.fp16.safetensors", "z.safetensors"):
        shutil.copy(folder / WEIGHTS, folder / stray)
        edit(folder / stray, lambda t: t.update({"proj_out.bias": t["proj_out.bias"] + 1, "surprise": torch.ones(1)}))
    assert np.array_equal(load_high(copy).params["proj_out.bias"], expected)
    reference = diffusers.WanTransformer3DModel.from_pretrained(folder)
    assert np.array_equal(reference.proj_out.bias.detach().numpy(), expected)
    (folder / WEIGHTS).rename(folder / "half-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"ema\.safetensors and half-"):
        load_high(copy)
    for stray in ("ema.safetensors", "diffusion_pytorch_model.fp16.safetensors", "z.safetensors"):
        (folder / stray).unlink()
    assert np.array_equal(load_high(copy).params["proj_out.bias"], expected)  # the only one there is


@pytest.mark.parametrize("name", ["proj_out.scale_weight", "scaled_fp8", "proj_out.weight.absmax"])
def test_quantised_weights_are_refused_with_what_works(name, copy):
    edit(copy / "transformer" / WEIGHTS, lambda t: t.update({name: torch.ones(1)}))
    with pytest.raises(CheckpointError, match=name):
        load_pipeline(copy, dtype="float32", mesh=(1, 1, 1)).check_components("denoise_high")


@pytest.mark.parametrize(
    ("offsets", "message"),
    [([[0, 8], [4, 12]], r"byte 4\b"), ([[0, 8], [12, 20]], r"hole.*byte 8\b"), ([[4, 12]], "hole")],
)
def test_tensors_that_overlap_or_leave_holes_are_refused(offsets, message, tmp_path):
    """As the format's own reader refuses them."""
    fields = {str(i): {"dtype": "F32", "shape": [2], "data_offsets": span} for i, span in enumerate(offsets)}
    header = json.dumps(fields).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(max(last for _, last in offsets)))
    with pytest.raises(CheckpointError, match=message):
        locate_tensors(on_disk(file))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load_file(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS"),
        (b"\n<!DOCTYPE html><title>Sign in</title>", "web page"),
        (b"PK\x03\x04" + bytes(100), "safetensors.torch.save_file"),
        (b"GGUF\x03" + bytes(100), "GGUF"),
        (gzip.compress(bytes(100), mtime=0), "gzip"),
        (b"", "damaged"),
    ],
)
def test_what_is_no_file_of_weights_is_named(content, message, tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        locate_tensors(on_disk(file))


def test_text_encoder_stored_under_either_tied_name(copy):
    """Published text encoders name the embedding shared.weight, encoder.embed_tokens.weight, or both."""
    file = copy / "text_encoder" / "model.safetensors"

    def embedding():
        pipe = load_pipeline(copy, dtype="float32", mesh=(1, 1, 1))
        return np.asarray(pipe.runtime.component("text_encoder").params["shared.weight"])

    expected = embedding()
    edit(file, lambda t: t.update({"encoder.embed_tokens.weight": t.pop("shared.weight")}))
    assert np.array_equal(embedding(), expected)
    edit(file, lambda t: t.update({"shared.weight": t["encoder.embed_tokens.weight"].clone()}))
    assert np.array_equal(embedding(), expected)


def test_image_encoder_with_and_without_the_old_prefix(checkpoint, tmp_path):
    """Of the class without a projection; published checkpoints say the one with it, whose names have the prefix."""
    copy = shutil.copytree(checkpoint("wan2.1-i2v-14b-480p"), tmp_path / "copy")
    index = json.loads((copy / "model_index.json").read_text()) | {"image_encoder": ["transformers", "CLIPVisionModel"]}
    (copy / "model_index.json").write_text(json.dumps(index))
    file = copy / "image_encoder" / "model.safetensors"
    bare = {name.removeprefix("vision_model."): t for name, t in safetensors.torch.load_file(file).items()}
    del bare["visual_projection.weight"]
    for prefix in ("", "vision_model."):
        safetensors.torch.save_file({prefix + name: t for name, t in bare.items()}, file)
        pipe = load_pipeline(copy, dtype="float32", mesh=(1, 1, 1))
        assert pipe.runtime.component("image_encoder").params


def test_float32_parts_stay_float32(pipeline):
    params = pipeline(KIND, "bfloat16").runtime.component("denoise_high").params
    float32 = {name for name, value in params.items() if value.dtype == np.float32}
    assert "condition_embedder.time_embedder.linear_1.weight" in float32
    assert "blocks.template.norm2.weight" in float32
    assert "blocks.template.attn1.to_q.weight" not in float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transformer": ["diffusers", "LTXVideoTransformer3DModel"]}, "Wan 2.1.*2.2"),
        ({"vae": [None, None]}, "vae"),
        ({"boundary_ratio": None}, "boundary_ratio"),
        ({"text_encoder": ["transformers", "BertModel"]}, "BertModel"),
    ],
)
def test_other_families_are_refused(copy, change, message):
    index = json.loads((copy / "model_index.json").read_text()) | change
    (copy / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        load_pipeline(copy, mesh=(1, 1, 1)).runtime.model.components  # noqa: B018


@pytest.mark.parametrize("name", ["nowhere/to/be/found", "./nowhere", "nowhere", "Wan-AI/not-there", "", None])
def test_unknown_models_are_refused(name):
    with pytest.raises(CheckpointError, match=rf"{name}.* hub"):
        load_pipeline(name)


def test_models_as_first_published_are_refused_with_where_the_others_are(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **more: str(tmp_path))
    with pytest.raises(CheckpointError, match=r"huggingface\.co/models\?search=Wan2\.2-T2V-A14B-Diffusers"):
        Checkpoint("Wan-AI/Wan2.2-T2V-A14B")


def test_only_files_that_are_read_are_fetched_from_the_hub(tmp_path, monkeypatch):
    hub, cache = tmp_path / "hub", tmp_path / "cache"
    for name in (
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
        "transformer/diffusion_pytorch_model.fp16.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.bf16.safetensors",
        "text_encoder/of_no_known_name.safetensors",
    ):
        (hub / name).parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file({name: torch.zeros(1)}, hub / name)
    for name in ("model_index", "transformer/config", "Other/model_index", "Other/transformer/config"):
        (hub / f"{name}.json").parent.mkdir(parents=True, exist_ok=True)
        (hub / f"{name}.json").write_text('{"transformer": ["diffusers", "Transformer"], "vae": [null, null]}')
    shards = {"weight_map": {str(i): f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)}}
    (hub / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(shards))

    def snapshot_download(repository, *, allow_patterns, ignore_patterns):
        names = [str(file.relative_to(hub)) for file in hub.rglob("*.*")]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (cache / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(hub / name, cache / name)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    opened = Checkpoint("someone/model")
    fetched = {str(file.relative_to(cache)) for file in cache.rglob("*.json")}
    of_transformer = {"config", "diffusion_pytorch_model.safetensors.index"}
    assert fetched == {"model_index.json", *(f"transformer/{name}.json" for name in of_transformer)}
    parts = "transformer", "vae", "text_encoder"
    read = [index_tensors(opened, part, torch.nn.Module(), (), ()) for part in parts]
    fetched = {str(file.relative_to(cache)) for file in cache.rglob("*.safetensors")}
    assert fetched == {name for tensors in read for name in tensors}
    assert [len(tensors) for tensors in read] == [2, 1, 1]


def test_folder_without_index_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no model_index\.json"):
        load_pipeline(tmp_path)


PEAK = """
import re, sys
from pathlib import Path
from wan_tpu import load_pipeline

def kib(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

pipe = load_pipeline(sys.argv[1], dtype=sys.argv[2], mesh=(1, 1, 1))
pipe.runtime.component("decoder")  # warms up what every load imports
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
before = kib("VmRSS")
params = pipe.runtime.component("denoise").params
size = sum(value.nbytes for value in params.values())
print((kib("VmHWM") - before) * 1024 / size, size)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    expert = {"num_attention_heads": 8, "attention_head_dim": 96, "ffn_dim": 2048, "num_layers": 10}
    return make_checkpoint(tmp_path_factory.mktemp("large") / "checkpoint", "wan2.1-t2v-14b", transformer=expert)


@pytest.mark.thorough
def test_peak_memory_of_loading_stays_below_1_3_times_the_component(large):
    """On CPU the component itself is in host memory too: what is left for the reader is 0.3 of it."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, large, "bfloat16"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    ratio, size = (float(word) for word in done.stdout.split())
    print(f"peak {ratio:.2f} x {size / 1e6:.0f} MB")
    assert size > 150e6
    assert 0.9 < ratio < 1.3


@pytest.mark.long
def test_weights_are_freed_after_their_stage_unless_kept(checkpoint, pipeline):
    kind = "wan2.1-t2v-1.3b"
    request = GenerationRequest(height=32, width=32, frames=1, steps=1, guidance_scale=1.0)
    freeing = load_pipeline(checkpoint(kind), dtype="float32", mesh=(1, 1, 1), keep_weights=False)
    freeing.generate(request)
    assert not freeing.runtime._components
    keeping = pipeline(kind)
    keeping.encode(keeping.plan(request))
    assert keeping.runtime._components


def test_tokenizer_may_know_fewer_words_than_the_text_encoder(checkpoint):
    """As diffusers takes it; none at all is what transformers makes of a missing file."""
    with Tokenizer(checkpoint(KIND) / "tokenizer", vocabulary=250_000).lock() as tokenizer:
        assert len(tokenizer("a cat")["input_ids"]) > 1


@pytest.mark.parametrize(
    ("kind", "folder"), [("wan2.1-i2v-14b-480p", "image_processor"), ("hunyuanvideo1.5-480p-i2v", "feature_extractor")]
)
def test_image_processor_is_read_when_its_encoder_is_loaded(kind, folder, checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint(kind), tmp_path / "copy")
    open_model(Checkpoint(copy)).prepare("image_encoder")
    (copy / folder / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=rf"{folder}/preprocessor_config\.json"):
        open_model(Checkpoint(copy)).prepare("image_encoder")
