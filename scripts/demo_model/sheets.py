"""Pictures people look at: clips as rows of frames, with a line of text above each."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

_SHOWN = 9  # frames of 17
_GAP, _LINE = 2, 12


def save_rows(file: Path, clips: Sequence[np.ndarray], titles: Sequence[str] | None = None) -> None:
    """Draw clips below each other, uint8 or float in [0, 1], [T, H, W, 3]; every other frame is shown."""
    rows = [_row(clip) for clip in clips]
    head = _LINE if titles else 0
    height = sum(row.shape[0] + head + _GAP for row in rows)
    sheet = Image.new("RGB", (max(row.shape[1] for row in rows), height), "white")
    draw = ImageDraw.Draw(sheet)
    y = 0
    for i, row in enumerate(rows):
        if titles:
            draw.text((1, y), titles[i], fill="black", font_size=10)
        sheet.paste(Image.fromarray(row), (0, y + head))
        y += row.shape[0] + head + _GAP
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(file)


def _row(clip: np.ndarray) -> np.ndarray:
    if clip.dtype != np.uint8:
        clip = (np.clip(clip, 0, 1) * 255 + 0.5).astype(np.uint8)
    shown = clip[np.linspace(0, len(clip) - 1, min(_SHOWN, len(clip))).round().astype(int)]
    return np.concatenate(list(np.pad(shown, ((0, 0), (0, 0), (0, _GAP), (0, 0)), constant_values=255)), axis=1)
