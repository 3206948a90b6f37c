"""MiniMax-H3's prompts, alone and with keyframes, against diffusers' steps on transformers' Qwen3-VL."""

import itertools
import json
import shutil

import jax
import numpy as np
import pytest
from diffusers.modular_pipelines import PipelineState
from diffusers.modular_pipelines.minimax_h3 import before_encoder, encoders
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from tests.wan_tpu.minimax_h3_reference import Reference, relative
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.minimax_h3 import text
from wan_tpu.families.minimax_h3.config import TEXT_ROWS, read_config
from wan_tpu.families.minimax_h3.published import PUBLISHED
from wan_tpu.families.minimax_h3.small import make_checkpoint
from wan_tpu.families.minimax_h3.vision import pictures, presentation, tower
from wan_tpu.families.shared.token_counts import count_tokens
from wan_tpu.families.shared.tokenizing import Tokenizer
from wan_tpu.runtime.components import Loaded, load_component
from wan_tpu.runtime.mesh import make_mesh

TOLERANCE = 1e-5  # Of float32, relative to the largest value.
MODEL = PUBLISHED["minimax-h3"]
PROMPTS = {
    "a letter": "a",
    "words": "A cat plays the piano, and birds sing.",
    "other scripts": "一只猫弹钢琴, на заднем плане «море» 🌊 قطة",
    "names of special tokens": "a <|image_pad|> of <|vision_start|> something",
    "many words": "the sea and the wind " * 30,
}


def draw_keyframes(count, height=64, width=96):
    """Return random images, which differ by their brightness, too."""
    generator = np.random.default_rng(count)
    pixels = (generator.integers(0, 256 // (i + 1), (height, width, 3), dtype=np.uint8) for i in range(count))
    return [Image.fromarray(values) for values in pixels]


class Encoder:
    """The text encoder and its vision tower, and the program of prompts with keyframes."""

    def __init__(self, folder):
        self.config, mesh = read_config(Checkpoint(folder)), make_mesh((1, 1, 1), heads=4)
        self.tokenizer = Tokenizer(folder / "tokenizer", self.config.text_encoder["vocab_size"])
        self._parts = [
            load_component(Checkpoint(folder), component, "float32", mesh)
            for component in (text.text_encoder(self.config), tower.vision(self.config))
        ]
        self._run = jax.jit(lambda params, inputs: presentation.encode(self._load(params), inputs))

    def _load(self, params):
        return [Loaded(part.module, weights) for part, weights in zip(self._parts, params, strict=True)]

    def encode(self, inputs):
        """Return the embeddings [R, C] of a `Presentation`."""
        return np.asarray(self._run([part.params for part in self._parts], inputs)[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a small checkpoint whose vision tower attends sharply, so that it matters where a patch lies."""
    folder = make_checkpoint(tmp_path_factory.mktemp("h3") / "model")
    file = folder / "text_encoder" / "model.safetensors"
    weights = load_file(file)
    sharp = {name: 12 * value for name, value in weights.items() if "attn.qkv." in name}
    assert len(sharp) == 8
    save_file(weights | sharp, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def ours(folder):
    return Encoder(folder)


def test_a_prompt_longer_than_all_lengths_is_cut_to_the_longest(ours):
    prompt = "the sea and the wind " * 500
    ids, count, [cut] = text.tokenize_prompt(ours.tokenizer, prompt)
    assert ids.shape[1] == count == TEXT_ROWS[-1] and (cut.tokens, cut.read) == (10500, TEXT_ROWS[-1])
    assert prompt[: TEXT_ROWS[-1]].endswith(cut.end)
    inputs, [cut] = presentation.present(ours.config, ours.tokenizer, prompt, draw_keyframes(1), (0,))
    assert cut.read == TEXT_ROWS[-1] - 13  # Its keyframe's label takes 13.
    assert inputs.count == inputs.ids.size


@pytest.mark.parametrize("name", [*PROMPTS, "long"])
@pytest.mark.parametrize("room", [5, 6144])
def test_tokens_are_counted_and_cut_without_transformers_as_with_it(name, room, folder, ours):
    prompt = PROMPTS.get(name, "the sea and the wind " * 300)
    with ours.tokenizer.lock() as tokenizer:
        ids, cuts = text.read_words(tokenizer, prompt, room)
        expected = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    count = count_tokens(str(folder / "tokenizer"), prompt, room)
    assert count.tokens == expected and min(expected, room) == len(ids)
    assert cuts == ([] if count.cut is None else [count.cut])


def test_tokens_of_an_unreadable_tokenizer_are_not_counted(tmp_path):
    assert count_tokens(None, "a", 5) is None and count_tokens(str(tmp_path), "a", 5) is None


def test_keyframes_are_read_before_the_prompt_as_diffusers_does(folder, ours):
    prompt, keyframes, state = PROMPTS["other scripts"], draw_keyframes(2), PipelineState()
    inputs, cuts = presentation.present(ours.config, ours.tokenizer, prompt, keyframes, (0, 1))
    assert not cuts and inputs.anchors.tolist() == [[0, 1]]
    state.set("prompt", prompt)
    state.set("keyframes", keyframes)
    _, state = encoders.MiniMaxH3FL2VATextEncoderStep()(Reference(folder).pipeline, state)
    expected, tags = state.get("prompt_embeds").numpy()[0], state.get("text_token_tags").numpy()
    order, rows = inputs.order[0], int(inputs.count[0, 0])
    vision = 2 * pictures.vision_rows(ours.config, 64, 96)
    assert sorted(order) == list(range(vision + TEXT_ROWS[0]))
    assert tags[order[:rows]].tolist() == [0] * vision + [1] * (rows - vision)
    assert relative(ours.encode(inputs)[:rows], expected[order[:rows]]) < TOLERANCE


@pytest.mark.parametrize("last", [(108, 192), (141, 97), (96, 160)])
def test_keyframes_are_put_onto_the_video_as_diffusers_does(last):
    """A photo of 16:9, the video's shape but for rounding; and another of that size, an upright one, a fitting one."""
    [first], [follower] = draw_keyframes(1, 108, 192), draw_keyframes(1, *last)
    state = PipelineState()
    for name, value in {"image": first, "last_image": follower, "height": 96, "width": 160}.items():
        state.set(name, value)
    step = before_encoder.MiniMaxH3ResizeStep()
    _, state = step(step.init_pipeline(), state)
    ours = pictures.fit_keyframes([first, follower], 96, 160, slack=32)
    for actual, expected in zip(ours, state.get("keyframes"), strict=True):
        assert np.array_equal(actual, expected)


def test_keyframes_have_as_many_rows_as_transformers_gives_them():
    limits = MODEL.picture["shortest_edge"], MODEL.picture["longest_edge"]
    for height, width in (*itertools.product(range(32, 1345, 32), repeat=2), (4096, 4128), (40, 6000)):
        rows, columns = smart_resize(height, width, 32, *limits)
        assert pictures.vision_rows(MODEL, height, width) == rows * columns // 1024 + 2
        assert height * width < 65536 or height > 1344 or width > 1344 or (rows, columns) == (height, width)
    assert pictures.vision_rows(MODEL, 768, 1344) == 1010


@pytest.mark.parametrize("prefix", ["visual.", "model.visual."])
def test_the_vision_tower_is_read_under_its_names_in_all_versions_of_transformers(prefix, folder, tmp_path, ours):
    published = load_file(folder / "text_encoder" / "model.safetensors")
    names = {name: name.replace("model.visual.", prefix) for name in published}
    (tmp_path / "text_encoder").mkdir()
    shutil.copy(folder / "modular_model_index.json", tmp_path)
    save_file({names[name]: x for name, x in published.items()}, tmp_path / "text_encoder" / "model.safetensors")
    loaded = load_component(Checkpoint(tmp_path), tower.vision(ours.config), "float32", make_mesh((1, 1, 1), heads=4))
    stacked = loaded.params["blocks.template.mlp.linear_fc1.weight"]
    assert np.array_equal(stacked[3], published["model.visual.blocks.3.mlp.linear_fc1.weight"])


def test_a_tokenizer_without_images_is_refused(folder, tmp_path, ours):
    shutil.copytree(folder / "tokenizer", tmp_path / "tokenizer")
    for file in (tmp_path / "tokenizer").iterdir():
        file.write_text(file.read_text().replace("<|image_pad|>", "<|picture|>"))
    tokenizer = Tokenizer(tmp_path / "tokenizer", ours.config.text_encoder["vocab_size"])
    with pytest.raises(CheckpointError, match=r"<\|image_pad\|>"):
        presentation.present(ours.config, tokenizer, "a cat", draw_keyframes(1), (0,))


@pytest.mark.parametrize(
    ("file", "config", "expected"),
    [
        ("preprocessor_config.json", {"min_pixels": 1, "max_pixels": 9}, (1, 9)),
        ("processor_config.json", {"image_processor": {"size": {"shortest_edge": 2, "longest_edge": 8}}}, (2, 8)),
        (None, {}, tuple(MODEL.picture.values())),
        ("preprocessor_config.json", {"size": {"height": 5}}, "has processor size {'height': 5}; give something like"),
        ("preprocessor_config.json", {"patch_size": 14}, "has processor patch_size 14; supported: 16"),
    ],
)
def test_the_limits_of_images_are_those_of_the_checkpoint(file, config, expected, folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "processor").unlink()
    (tmp_path / "processor").mkdir()
    if file is not None:
        settings = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        whole = {key: settings | value for key, value in config.items() if isinstance(value, dict) and key != "size"}
        (tmp_path / "processor" / file).write_text(json.dumps(whole or settings | config))
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            read_config(Checkpoint(tmp_path))
    else:
        assert tuple(read_config(Checkpoint(tmp_path)).picture.values()) == expected
