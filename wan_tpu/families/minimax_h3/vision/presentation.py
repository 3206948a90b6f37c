"""A prompt with its keyframes or references, each after a label, as MiniMax-H3's text encoder reads it.

Shapes: R rows, k images (pairs of a video's frames are images, too), h w rows and columns of an image's tokens.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from wan_tpu.families.minimax_h3 import references, text
from wan_tpu.families.minimax_h3.config import LABEL, TEXT_ROWS, MiniMaxH3Config, fit_rows
from wan_tpu.families.minimax_h3.references import Measure, Part
from wan_tpu.families.minimax_h3.vision import pictures, tower
from wan_tpu.families.shared.token_counts import Cut
from wan_tpu.families.shared.tokenizing import Tokenizer
from wan_tpu.runtime.components import Loaded

_START, _PICTURE, _END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
# A video's tokens have another number, but their embeddings are those of the vision tower anyway.


class Presentation(NamedTuple):
    """The text encoder's inputs. Rows are in the order in which it reads them, padding last.

    Attributes:
        ids: int32 [1, R].
        places: int32 [3, R], time, height and width of each row.
        order: int32 [1, R], the index of each row of the transformer's order: images, text, padding.
        count: int32 [1, 1], the number of real rows.
        anchors: int32 [1, k], which end of the video each keyframe is: 0 the first, 1 the last; [1, 0] for references.
        starts: int32 [k], the index of each image's first token.
        patches: uint8 [n, h, w, ...] each, the images (`pictures.cut_patches`, `cut_pairs`); those of one size are one
            array if they follow each other.
    """

    ids: Any
    places: Any
    order: Any
    count: Any
    anchors: Any
    starts: Any
    patches: tuple[Any, ...]


def shapes(config: MiniMaxH3Config, height: int, width: int, images: int, text_rows: int) -> Presentation:
    """Return the shapes of the inputs for keyframes of a size in pixels, and a text of that many rows."""
    rows = images * pictures.vision_rows(config, height, width) + text_rows
    return _list_shapes([(images, pictures.token_grid(config, height, width), 1)], rows, images)


def reference_shapes(config: MiniMaxH3Config, measures: Sequence[Measure], text_rows: int) -> Presentation:
    """Return the same for references."""
    rows = references.find_room(config, measures).vision + text_rows
    return _list_shapes(references.list_seen(config, measures), rows, 0)


def _list_shapes(groups: Sequence[tuple[int, tuple[int, int], int]], rows: int, keyframes: int) -> Presentation:
    """Return the shapes for groups of images: their number, rows and columns of tokens, frames of a patch."""
    integers = {
        "ids": (1, rows),
        "places": (3, rows),
        "order": (1, rows),
        "count": (1, 1),
        "anchors": (1, keyframes),
        "starts": (sum(count for count, _, _ in groups),),
    }
    return Presentation(
        **{name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in integers.items()},
        patches=tuple(
            jax.ShapeDtypeStruct((count, *grid, frames * pictures.CHANNELS * pictures.SIDE**2), jnp.uint8)
            for count, grid, frames in groups
        ),
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
    grid = patches.shape[1], patches.shape[2]
    parts = [Part(LABEL.format(i + 1), grid) for i in range(len(keyframes))]
    vision = len(parts) * (math.prod(grid) + pictures.MARKS)
    return _read(shared, prompt, parts, (patches,), vision=vision, anchors=anchors)


def present_references(
    config: MiniMaxH3Config,
    shared: Tokenizer,
    prompt: str,
    measures: Sequence[Measure],
    patches: Sequence[np.ndarray],
) -> tuple[Presentation, list[Cut]]:
    """Return a prompt with its references, and the cut as above.

    Args:
        config, shared, prompt: As above.
        measures: The references.
        patches: Those of each image and video.
    """
    parts = list(references.read_parts(config, measures))
    room = references.find_room(config, measures).vision
    return _read(shared, prompt, parts, tuple(patches), vision=room, anchors=())


def _read(
    shared: Tokenizer,
    prompt: str,
    parts: Sequence[Part],
    patches: tuple[np.ndarray, ...],
    *,
    vision: int,
    anchors: Sequence[int],
) -> tuple[Presentation, list[Cut]]:
    """Return labels, images and a prompt as the text encoder reads them; `vision` is the room for images."""
    with shared.lock() as tokenizer:
        room = TEXT_ROWS[-1]
        labels = [text.read_words(tokenizer, part.label, room)[0] for part in parts]
        start, picture, end = (_number(tokenizer, name) for name in (_START, _PICTURE, _END))
        spoken = sum(map(len, labels))
        words, cuts = text.read_words(tokenizer, prompt, room - spoken)
        pieces: list[tuple[list[int], tuple[int, int] | None]] = []
        for part, label in zip(parts, labels, strict=True):
            pieces.append((label, None))
            if part.grid is not None:
                pieces.append(([start, *[picture] * math.prod(part.grid), end], part.grid))
        pieces.append((words, None))
        real = [number for ids, _ in pieces for number in ids]
        rows = vision + fit_rows(spoken + len(words))
        padded = [text.pad_rows(real, rows)]
        ids, _ = shared.to_arrays({"input_ids": padded, "attention_mask": padded})
    firsts = np.cumsum([0, *(len(ids) for ids, _ in pieces)])[:-1]
    seen = np.concatenate([np.full(len(ids), grid is not None) for ids, grid in pieces])
    order = np.concatenate([np.flatnonzero(seen), np.flatnonzero(~seen), np.arange(len(real), rows)])
    presentation = Presentation(
        ids=ids,
        places=_place(pieces, rows),
        order=order.astype(np.int32)[None],
        count=np.array([[len(real)]], np.int32),
        anchors=np.array([anchors], np.int32),
        starts=(firsts[[grid is not None for _, grid in pieces]] + 1).astype(np.int32),
        patches=patches,
    )
    return presentation, cuts


def _number(tokenizer: Any, token: str) -> int:
    """Return the number of a token; raises `ValueError` where the tokenizer lacks it."""
    number = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(number, int) or tokenizer.convert_ids_to_tokens(number) != token:
        raise ValueError(f"it has no {token}, which Qwen3-VL's tokenizer has")
    return number


def _place(pieces: Sequence[tuple[Sequence[int], tuple[int, int] | None]], rows: int) -> np.ndarray:
    """Return time, height and width of every row, int32 [3, R].

    A row of text is one step after the previous row in all three. An image has a single time, its tokens have rows and
    columns from there, and what follows is behind the longer side.

    Args:
        pieces: The ids of labels, images and prompt, and the rows and columns of an image's tokens.
        rows: R.
    """
    columns, now = [], 0
    for ids, grid in pieces:
        if grid is not None:
            picture = np.stack(np.meshgrid([0], *map(np.arange, grid), indexing="ij")).reshape(3, -1)
            columns += [np.full((3, 1), now), now + 1 + picture, np.full((3, 1), now + 1 + max(grid))]
            now += max(grid) + pictures.MARKS
        else:
            columns.append(np.broadcast_to(now + np.arange(len(ids)), (3, len(ids))))
            now += len(ids)
    padding = rows - sum(column.shape[1] for column in columns)
    columns.append(np.broadcast_to(now + np.arange(padding), (3, padding)))
    return np.concatenate(columns, axis=1).astype(np.int32)


def encode(loaded: Sequence[Loaded], presentation: Presentation) -> jax.Array:
    """Return the text that the transformer reads, [1, R, C]: rows of images, of text, and padding.

    Args:
        loaded: From `text.text_encoder` and `tower.vision`.
        presentation: The prompt with its images.
    """
    encoder, vision = loaded
    seen = [tower.encode_pictures(vision, patches) for patches in presentation.patches]
    tokens = [image for group, _ in seen for image in group]
    layers = len(seen[0][1])
    deepstack = [[image for _, groups in seen for image in groups[layer]] for layer in range(layers)]
    picture = text.VisionOutput(presentation.starts, tokens, deepstack)
    encoded = text.encode_prompt(encoder, presentation.ids, presentation.places, picture)
    return encoded[:, presentation.order[0]]


def count_flops(config: MiniMaxH3Config, height: int, width: int, images: int, text_rows: int) -> int:
    """Count the operations of encoding a text with keyframes of a size in pixels (a multiply-add is two)."""
    grid = pictures.token_grid(config, height, width)
    rows = images * (math.prod(grid) + pictures.MARKS) + text_rows
    return text.count_flops(config, rows) + tower.count_flops(config, grid, images)


def count_reference_flops(config: MiniMaxH3Config, measures: Sequence[Measure], text_rows: int) -> int:
    """Count the same for references."""
    rows = references.find_room(config, measures).vision + text_rows
    seen = references.list_seen(config, measures)
    return text.count_flops(config, rows) + sum(tower.count_flops(config, grid, count) for count, grid, _ in seen)
