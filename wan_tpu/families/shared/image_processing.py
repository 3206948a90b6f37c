"""Turns images into the pixels that an image encoder takes, as the checkpoint's image processor says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from wan_tpu.sources.disk import explain_unusable

_CONFIG = "preprocessor_config.json"


class ImageProcessor:
    """An image encoder's processor of transformers, which is read on first use and kept."""

    def __init__(self, kind: type[Any], folder: Path, shape: tuple[int, ...]) -> None:
        """Remember where the processor is; `shape` is (3, height, width) of an image as the encoder takes it."""
        self._kind, self._folder, self._shape = kind, folder, shape
        self._processor: Any = None

    def read(self) -> None:
        """Read the configuration once, and try it with an image.

        Raises:
            CheckpointError: It is missing or damaged, or makes images of another shape.
            Unavailable: The disk or the machine fails.
        """
        if self._processor is not None:
            return
        try:
            processor = self._kind.from_pretrained(str(self._folder.resolve()))
            shape = _process(processor, [Image.new("RGB", (64, 48))]).shape[1:]
            if shape != self._shape:
                raise ValueError(f"it makes images of shape {shape}, but the image encoder takes {self._shape}")
        except MemoryError:  # This is the machine's error, not the checkpoint's.
            raise
        except Exception as error:
            raise explain_unusable(error, self._folder / _CONFIG, "image processor") from error
        self._processor = processor

    def __call__(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Return images as float32 [n, 3, height, width]; raises as `read` does."""
        self.read()
        return _process(self._processor, images)


def _process(processor: Any, images: Sequence[Image.Image]) -> np.ndarray:
    values = processor.preprocess(list(images), do_resize=True, do_convert_rgb=True, return_tensors="np")
    return np.asarray(values["pixel_values"], np.float32)
