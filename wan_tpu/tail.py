"""The end of a video, from which another one of the same model goes on with its motion and its sound.

It holds latents as they were denoised, so that nothing is lost to the encoding of an mp4, and the waveform of the
sound, which is encoded again: sound latents that are passed on from video to video drift.

Shapes: C channels, T latent frames, H W latent height and width.
"""

import dataclasses
import functools
import hashlib
import json
from typing import NamedTuple

import numpy as np
import safetensors
import safetensors.numpy

from wan_tpu.errors import InvalidRequest


class Overlap(NamedTuple):
    """The frames that a video shares with the one that it continues.

    Attributes:
        frames: How many there are, at the end of one video and at the beginning of the next.
        latents: How many latent frames they are.
        blended: How many of them, the last ones, the decoder blends with the frames that follow.
    """

    frames: int
    latents: int
    blended: int


@dataclasses.dataclass(frozen=True, eq=False)
class Tail:
    """The end of a video.

    Attributes:
        latents: Float32 [1, C, T, H, W]; None where only the sound is needed.
        sound: Float32 [channels, samples] in [-1, 1], from the first of these frames on; None without sound.
        height: Of the video, in pixels.
        width: Of the video, in pixels.
        frames: How many frames these are.
        blended: How many of them, the last ones, the decoder blends with the frames that follow.
        rate: Samples per second of the sound; 0 without sound.
        pixels: Uint8 [frames, height, width, 3], in place of latents, of a video that is known from its file alone.
        path: That file's, if it has one.
        fps: Frames per second; 0 if it isn't known.
        smaller: The first stage's latents, at half the size, of a video that was made in two stages.
        vae: Whose latents these are, `ModelLimits.vae` of the model; empty if it isn't known.
    """

    latents: np.ndarray | None = dataclasses.field(repr=False)
    sound: np.ndarray | None = dataclasses.field(repr=False)
    height: int
    width: int
    frames: int
    blended: int
    rate: int = 0
    pixels: np.ndarray | None = dataclasses.field(default=None, repr=False)
    path: str | None = None
    fps: float = 0.0
    smaller: np.ndarray | None = dataclasses.field(default=None, repr=False)
    vae: str = ""

    @property
    def samples(self) -> int:
        """Samples of each channel of the sound."""
        return 0 if self.sound is None else self.sound.shape[1]

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays."""
        return sum(array.nbytes for array in self._arrays.values())

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of what it holds."""
        digest = hashlib.sha256(json.dumps([getattr(self, name) for name in _NUMBERS]).encode())
        for name, array in self._arrays.items():
            digest.update(f"{name} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same. Requests are found by their plans, of which every process has its own copy."""
        return isinstance(other, Tail) and (self.digest, self.fps) == (other.digest, other.fps)

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {"latents": self.latents, "sound": self.sound, "pixels": self.pixels, "smaller": self.smaller}
        return {name: array for name, array in arrays.items() if array is not None}

    def __str__(self) -> str:
        return f"with SHA-256 {self.digest[:16]}"

    def without_latents(self) -> "Tail":
        """Return the tail without its latents or pixels, which only the encoder needs."""
        return dataclasses.replace(self, latents=None, pixels=None, smaller=None)

    def dump(self) -> bytes:
        """Return the content of a safetensors file."""
        numbers = {name: getattr(self, name) for name in (*_NUMBERS, "fps", "vae")}
        tensors = {name: np.ascontiguousarray(array) for name, array in self._arrays.items()}
        return safetensors.numpy.save(tensors, metadata={"type": "Tail", "numbers": json.dumps(numbers)})


_NUMBERS = "height", "width", "frames", "blended", "rate"


def parse_tail(content: bytes, source: str) -> Tail:
    """Read what `Tail.dump` returned; `source` is its name in messages.

    Raises:
        InvalidRequest: It is something else, or damaged.
    """
    try:
        size = int.from_bytes(content[:8], "little")  # The format: the header's length, the header as JSON, tensors.
        numbers = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["numbers"])
        tensors = safetensors.numpy.load(content)
        height, width, frames, blended, rate = (int(numbers[name]) for name in _NUMBERS)
        measures = height, width, frames, blended, rate
        smaller, fps, vae = tensors.get("smaller"), float(numbers.get("fps", 0)), str(numbers.get("vae", ""))
        tail = Tail(tensors["latents"], tensors.get("sound"), *measures, smaller=smaller, fps=fps, vae=vae)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{source} isn't the end of a video, or is damaged ({error}); give a file that Tail.dump wrote",
            "references",
        ) from None
    return tail


def find_sample(frame: int, rate: int, fps: float) -> int:
    """Return the sample of a sound with which a frame begins."""
    return round(frame * rate / fps)


def blend_goal(samples: np.ndarray, goal: Tail, begin: int, fps: float) -> np.ndarray:
    """Return the sound of a video that ends as another take of it does: its own, and then that of the other's end.

    Both are blended at the beginning of that end, for as long as the decoder blends frames.

    Args:
        samples: The new video's sound, float32 [channels, samples].
        goal: The other take's end.
        begin: The sample with which that end begins.
        fps: Frames per second.
    """
    if goal.sound is None:
        return samples
    count = max(0, min(goal.samples, samples.shape[1] - begin))
    share = np.clip(np.arange(count) / max(1, find_sample(goal.blended, goal.rate, fps)), 0, 1).astype(np.float32)
    blended = samples.copy()
    end = blended[:, begin : begin + count]
    end[:] = (1 - share) * end + share * goal.sound[:, :count]
    return blended


def blend_sound(samples: np.ndarray, tail: Tail, fps: float) -> np.ndarray:
    """Return the sound of a video that continues another one: first the tail's, then its own, blended where they meet.

    They are blended as long as the decoder blends frames, where both are the same sound, decoded twice.

    Args:
        samples: The new video's sound, float32 [channels, samples].
        tail: What it continues.
        fps: Frames per second.
    """
    if tail.sound is None:
        return samples
    first, end = (find_sample(count, tail.rate, fps) for count in (tail.frames - tail.blended, tail.frames))
    end = min(end, tail.samples, samples.shape[1])
    share = np.clip((np.arange(end) - first) / max(1, end - first), 0, 1).astype(np.float32)
    blended = samples.copy()
    blended[:, :end] = (1 - share) * tail.sound[:, :end] + share * samples[:, :end]
    return blended
