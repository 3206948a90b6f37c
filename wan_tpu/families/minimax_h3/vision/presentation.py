"""A prompt with its keyframes, as MiniMax-H3's text encoder reads it: each keyframe after a label, then the prompt.

Shapes: R rows, V of them of keyframes (their marks included), k keyframes, h w rows and columns of their tokens.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from wan_tpu.families.minimax_h3 import text
from wan_tpu.families.minimax_h3.config import LABEL, TEXT_ROWS, MiniMaxH3Config, fit_rows
from wan_tpu.families.minimax_h3.vision import pictures, tower
from wan_tpu.families.shared.token_counts import Cut
from wan_tpu.families.shared.tokenizing import Tokenizer
from wan_tpu.runtime.components import Loaded

_START, _PICTURE, _END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


class Presentation(NamedTuple):
    """The text encoder's inputs. Rows are in the order in which it reads them, padding last.

    Attributes:
        ids: int32 [1, R].
        places: int32 [3, R], time, height and width of each row.
        order: int32 [1, R], the index of each row of the transformer's order: keyframes, text, padding.
        count: int32 [1, 1], the number of real rows.
        anchors: int32 [1, k], which end of the video each keyframe is: 0 the first, 1 the last.
        starts: int32 [k], the index of each keyframe's first token.
        patches: uint8 [k, h, w, ...], the keyframes (`pictures.cut_patches`).
    """

    ids: Any
    places: Any
    order: Any
    count: Any
    anchors: Any
    starts: Any
    patches: Any


def shapes(config: MiniMaxH3Config, height: int, width: int, images: int, text_rows: int) -> Presentation:
    """Return the shapes of the inputs for keyframes of a size in pixels, and a text of that many rows."""
    grid = pictures.token_grid(config, height, width)
    rows = images * pictures.vision_rows(config, height, width) + text_rows
    values = pictures.CHANNELS * pictures.SIDE**2
    integers = {
        "ids": (1, rows),
        "places": (3, rows),
        "order": (1, rows),
        "count": (1, 1),
        "anchors": (1, images),
        "starts": (images,),
    }
    return Presentation(
        **{name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in integers.items()},
        patches=jax.ShapeDtypeStruct((images, *grid, values), jnp.uint8),
    )


def present(
    config: MiniMaxH3Config, shared: Tokenizer, prompt: str, keyframes: Sequence[Image.Image], anchors: Sequence[int]
) -> tuple[Presentation, list[Cut]]:
    """Return a prompt with its keyframes, and the cut if labels and prompt together are too long.

    Args:
        config: The model's configuration.
        shared: Qwen's tokenizer.
        prompt: The prompt.
        keyframes: RGB images in the size of the video.
        anchors: For each, which end of the video it is.

    Raises:
        CheckpointError: The tokenizer doesn't work.
    """
    patches = np.stack([pictures.cut_patches(config, keyframe) for keyframe in keyframes])
    _, height, width, _ = patches.shape
    with shared.lock() as tokenizer:
        room = TEXT_ROWS[-1]
        labels = [text.read_words(tokenizer, LABEL.format(i + 1), room)[0] for i in range(len(keyframes))]
        start, picture, end = (_number(tokenizer, token) for token in (_START, _PICTURE, _END))
        spoken = sum(map(len, labels))
        words, cuts = text.read_words(tokenizer, prompt, room - spoken)
        block = [start, *[picture] * (height * width), end]
        parts = [part for label in labels for part in (label, block)] + [words]
        real = [number for part in parts for number in part]
        rows = len(keyframes) * len(block) + fit_rows(spoken + len(words))
        padded = [text.pad_rows(real, rows)]
        ids, _ = shared.to_arrays({"input_ids": padded, "attention_mask": padded})
    is_block = [part is block for part in parts]
    firsts = np.cumsum([0, *map(len, parts)])[:-1]
    seen = np.concatenate([np.full(len(part), is_seen) for part, is_seen in zip(parts, is_block, strict=True)])
    of_pictures, of_text = np.flatnonzero(seen), np.flatnonzero(~seen)
    order = np.concatenate([of_pictures, of_text, np.arange(len(real), rows)])
    presentation = Presentation(
        ids=ids,
        places=_place(parts, is_block, (height, width), rows),
        order=order.astype(np.int32)[None],
        count=np.array([[len(real)]], np.int32),
        anchors=np.array([anchors], np.int32),
        starts=(firsts[is_block] + 1).astype(np.int32),
        patches=patches,
    )
    return presentation, cuts


def _number(tokenizer: Any, token: str) -> int:
    """Return the number of a token; raises `ValueError` where the tokenizer lacks it."""
    number = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(number, int) or tokenizer.convert_ids_to_tokens(number) != token:
        raise ValueError(f"it has no {token}, which Qwen3-VL's tokenizer has")
    return number


def _place(parts: Sequence[Sequence[int]], is_block: Sequence[bool], grid: tuple[int, int], rows: int) -> np.ndarray:
    """Return time, height and width of every row, int32 [3, R].

    A row of text is one step after the previous row in all three. A keyframe has a single time, its tokens have rows
    and columns from there, and what follows is behind the longer side.
    """
    columns, now = [], 0
    picture = np.stack(np.meshgrid([0], *map(np.arange, grid), indexing="ij")).reshape(3, -1)
    for part, is_picture in zip(parts, is_block, strict=True):
        if is_picture:
            columns += [np.full((3, 1), now), now + 1 + picture, np.full((3, 1), now + 1 + max(grid))]
            now += max(grid) + pictures.MARKS
        else:
            columns.append(np.broadcast_to(now + np.arange(len(part)), (3, len(part))))
            now += len(part)
    padding = rows - sum(column.shape[1] for column in columns)
    columns.append(np.broadcast_to(now + np.arange(padding), (3, padding)))
    return np.concatenate(columns, axis=1).astype(np.int32)


def encode(loaded: Sequence[Loaded], presentation: Presentation) -> jax.Array:
    """Return the text that the transformer reads, [1, R, C]: rows of keyframes, of text, and padding.

    Args:
        loaded: From `text.text_encoder` and `tower.vision`.
        presentation: The prompt with its keyframes.
    """
    encoder, vision = loaded
    tokens, deepstack = tower.encode_pictures(vision, presentation.patches)
    picture = text.VisionOutput(presentation.starts, tokens, deepstack)
    encoded = text.encode_prompt(encoder, presentation.ids, presentation.places, picture)
    return encoded[:, presentation.order[0]]


def count_flops(config: MiniMaxH3Config, height: int, width: int, images: int, text_rows: int) -> int:
    """Count the operations of encoding a text with keyframes of a size in pixels (a multiply-add is two)."""
    grid = pictures.token_grid(config, height, width)
    rows = images * (math.prod(grid) + pictures.MARKS) + text_rows
    return text.count_flops(config, rows) + tower.count_flops(config, grid, images)
