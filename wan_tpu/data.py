"""The values that cross from stage to stage: frozen dataclasses of host arrays, and their safetensors codec.

Shapes use one legend: B batch, T latent frames, H W latent height and width, L tokens, C channels.
"""

import base64
import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy, which safetensors' numpy codec needs)
import numpy as np
import safetensors
import safetensors.numpy

from wan_tpu.errors import InvalidInput, OutputError
from wan_tpu.media.image import to_uint8
from wan_tpu.plan import AUDIO, VIDEO
from wan_tpu.tail import Tail, find_sample

Array = np.ndarray
Arrays = Mapping[str, Array]
Value = TypeVar("Value", "Conditioning", "DenoiseState")


@dataclasses.dataclass(frozen=True)
class Conditioning:
    """The encoder stage's result for the experts.

    Attributes:
        prompt: Arrays [1, ...] of the model's text encoders by name; most models have "text" [1, L, C].
        negative: The same for the negative prompt; None without guidance.
        image: CLIP features [1, L=257, C] (Wan 2.1 I2V).
        image_latents: Mask and latents [1, 4+C, T, H, W], or the latents of one or two frames, [1, C, 1 or 2, H, W].
        larger_image_latents: The same at the size of enlarged latents, if images are encoded for both sizes.
        video_latents: Float32 [1, C, T, H, W] of the video that the request begins with.
        generator: The state of the request's random generator, uint8, if later draws continue after those for these
            latents.
    """

    prompt: Arrays
    negative: Arrays | None = None
    image: Array | None = None
    image_latents: Array | None = None
    larger_image_latents: Array | None = None
    video_latents: Array | None = None
    generator: Array | None = None

    @property
    def has_image(self) -> bool:
        """Whether the request has a first frame."""
        if "anchors" in self.prompt:
            return bool((self.prompt["anchors"] == 0).any())
        return self.image is not None or self.image_latents is not None

    @property
    def has_last_image(self) -> bool:
        """Whether the text encoder has read a last frame; its array "anchors" marks each image as first or last."""
        return "anchors" in self.prompt and bool((self.prompt["anchors"] == 1).any())


@dataclasses.dataclass(frozen=True)
class ImageCondition:
    """The part of a `Conditioning` that comes from images, or from a video.

    If the model's text encoder reads the images together with the prompt, it also holds the prompt's arrays.
    """

    image: Array | None = None
    image_latents: Array | None = None
    larger_image_latents: Array | None = None
    video_latents: Array | None = None
    prompt: Arrays | None = None
    generator: Array | None = None


@dataclasses.dataclass(frozen=True)
class DenoiseState:
    """Everything that denoising needs to continue: one expert hands it to the next, and snapshots hold it.

    Attributes:
        latents: The video's, float32 [1, C, T, H, W].
        history: The solver's terms, each float32 [1, C, T, H, W].
        step: Steps done, counted over all experts.
        audio: The sound's latents, float32 [1, ...]; None for models without sound.
        audio_history: The solver's terms for them, of the same shape.
        own_noise: Whether the caller supplied the initial noise of the video's latents. If so, the request's generator
            hasn't drawn it, and later steps draw different noise from it.
        chunks: For a video denoised in chunks, the latents of the chunks before this one, each float32 [1, C, T, H, W];
            empty once all are finished, because `latents` then holds the whole video.
        generator: The state of the request's random generator, uint8, if each chunk draws from it; otherwise None.
        smaller: The last latents of the first of two stages, float32 [1, C, T, H, W], if the end of such a video can be
            continued; otherwise None.
    """

    latents: Array
    history: tuple[Array, ...] = ()
    step: int = 0
    audio: Array | None = None
    audio_history: tuple[Array, ...] = ()
    own_noise: bool = False
    chunks: tuple[Array, ...] = ()
    generator: Array | None = None
    smaller: Array | None = None

    @property
    def parts(self) -> dict[str, tuple[Array, tuple[Array, ...]]]:
        """Latents and history of each part that is denoised, by name (`wan_tpu.plan.VIDEO` and `AUDIO`)."""
        video = {VIDEO: (self.latents, self.history)}
        return video if self.audio is None else video | {AUDIO: (self.audio, self.audio_history)}

    @classmethod
    def of_parts(
        cls, parts: Mapping[str, tuple[Array, tuple[Array, ...]]], step: int, *, own_noise: bool = False
    ) -> "DenoiseState":
        """Return the state that has these parts after `step` steps."""
        (latents, history), (audio, audio_history) = parts[VIDEO], parts.get(AUDIO, (None, ()))
        return cls(latents, history, step, audio, audio_history, own_noise)

    def with_parts(self, parts: Mapping[str, tuple[Array, tuple[Array, ...]]], step: int) -> "DenoiseState":
        """Return this state with new parts after `step` steps; everything else stays the same."""
        other = self.of_parts(parts, step, own_noise=self.own_noise)
        return dataclasses.replace(other, chunks=self.chunks, generator=self.generator, smaller=self.smaller)


@dataclasses.dataclass(frozen=True)
class Video:
    """A finished video.

    Attributes:
        pixels: Float32 [T, H, W, 3] in [0, 1], T pixel frames, H W in pixels.
        audio: Its sound, float32 [channels, samples] in [-1, 1]; None without sound.
        audio_rate: Samples per second of the sound.
        tail: Its end, for models that can continue a video with its motion and its sound: as one of the `references` of
            a request, it begins that request's video, and `join` shows both as one. None for other models.
    """

    pixels: Array
    fps: float
    audio: Array | None = None
    audio_rate: int | None = None
    tail: Tail | None = None

    @cached_property
    def frames(self) -> Array:
        """The pixels as uint8 [T, H, W, 3]."""
        return to_uint8(self.pixels)

    def join(self, following: "Video") -> "Video":
        """Return this video and one that begins with its `tail` as one video.

        Raises:
            InvalidInput: This video can't be continued so, or the other one doesn't match it.
        """
        tail = self.tail
        same = self.pixels.shape[1:] == following.pixels.shape[1:] and self.fps == following.fps
        if tail is None or not same or self.audio_rate != following.audio_rate:
            raise InvalidInput(f"{following} doesn't continue {self}; give one whose request had its tail")
        shown = len(self.pixels) - tail.blended
        pixels = np.concatenate([self.pixels[:shown], following.pixels[tail.frames - tail.blended :]])
        audio = None
        if self.audio is not None and following.audio is not None and self.audio_rate is not None:
            last = find_sample(shown, self.audio_rate, self.fps)
            origin = self.audio.shape[1] - tail.samples  # Where the other one's sound begins.
            audio = np.concatenate([self.audio[:, :last], following.audio[:, last - origin :]], axis=1)
        return Video(pixels, self.fps, audio, self.audio_rate, following.tail)

    def __repr__(self) -> str:
        frames, height, width, _ = self.pixels.shape
        sound = "" if self.audio is None else ", with sound"
        return f"<Video: {frames} frames of {width}x{height}, {self.fps:g} a second{sound}>"

    def _repr_html_(self) -> str:
        """Return a player for notebooks."""
        with tempfile.TemporaryDirectory() as folder:
            mp4 = self.save(Path(folder) / "video.mp4").read_bytes()
        return f'<video controls loop src="data:video/mp4;base64,{base64.b64encode(mp4).decode()}"></video>'

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write an mp4 (H.264, yuv420p, AAC) to `path`, completely or not at all, and return the path.

        Raises:
            OutputError: The file exists and `overwrite` is false, or it can't be written.
        """
        from wan_tpu.media.video import VideoWriter  # Imported here, so that the data types need no encoder.

        with VideoWriter(path, fps=self.fps, overwrite=overwrite) as writer:
            if self.audio is not None:
                assert self.audio_rate is not None, "sound without its rate"
                writer.set_audio(self.audio, self.audio_rate)
            writer.write(self.frames)
        return Path(path)


def join_conditioning(image: ImageCondition, *texts: Arrays) -> Conditioning:
    """Return the encoder stage's whole result.

    Args:
        texts: The arrays of the prompt and, with guidance, of the negative prompt; empty if `image` holds them.
    """
    first, *others = texts if image.prompt is None else (image.prompt,)
    negative = others[0] if others else None
    parts = {f.name: getattr(image, f.name) for f in dataclasses.fields(image) if f.name != "prompt"}
    return Conditioning(first, negative, **parts)


def save_value(value: Conditioning | DenoiseState, path: Path, notes: dict[str, Any] | None = None) -> None:
    """Write one stage value as a safetensors file, completely or not at all; bfloat16 stays bfloat16.

    Args:
        notes: JSON values to keep in the same file, such as the settings that the value was computed with.

    Raises:
        OutputError: The file can't be written.
    """
    write_whole(path, dump_value(value, notes))


def load_value(kind: type[Value], path: Path) -> tuple[Value, dict[str, Any]]:
    """Read a file that `save_value` wrote, and return the value and its notes.

    Raises:
        InvalidInput: The file is missing, truncated or holds another kind of value.
    """
    if not path.is_file():
        raise InvalidInput(f"{path} is missing; run the stage that writes it first")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return _rebuild_value(kind, tensors, metadata, str(path))
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"{path} is damaged ({error}); run the stage that writes it again") from None


def dump_value(value: Conditioning | DenoiseState, notes: dict[str, Any] | None = None) -> bytes:
    """Return the content of the file that `save_value` would write."""
    tensors = {name: np.ascontiguousarray(array) for name, array in flatten(value).items()}
    metadata = {"type": type(value).__name__, "notes": json.dumps(notes or {})}
    return safetensors.numpy.save(tensors, metadata=metadata)


def parse_value(kind: type[Value], content: bytes, source: str) -> tuple[Value, dict[str, Any]]:
    """Read the content of a file as `load_value` does; `source` is the file's name in messages."""
    try:
        size = int.from_bytes(content[:8], "little")  # The format: the header's length, the header as JSON, tensors.
        metadata = json.loads(content[8 : 8 + size])["__metadata__"]
        return _rebuild_value(kind, safetensors.numpy.load(content), metadata, source)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"{source} is damaged ({error}); run the stage that writes it again") from None


def flatten(value: Any) -> dict[str, Array]:
    """Return a stage's value as arrays by field, without copies; several arrays of a field are "history.0" and so on.

    Fields that are None or False are omitted.
    """
    arrays: dict[str, Array] = {}
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if isinstance(content, tuple):
            content = {str(i): term for i, term in enumerate(content)}
        if isinstance(content, Mapping):
            arrays |= {f"{field.name}.{name}": np.asarray(array) for name, array in content.items()}
        elif content is not None and content is not False:
            arrays[field.name] = np.asarray(content)
    return arrays


def rebuild(kind: type[Any], arrays: Mapping[str, Array]) -> Any:
    """Rebuild a value from what `flatten` returned; raises `KeyError` or `TypeError` if arrays are missing or wrong.

    Fields that only a later version knows are left out.
    """
    fields: dict[str, Any] = {}
    for name, array in arrays.items():
        field, _, part = name.partition(".")
        if part:
            fields.setdefault(field, {})[part] = array
        else:
            fields[field] = array
    if kind is Conditioning and not isinstance(fields["prompt"], dict):
        raise TypeError("its prompt is a single array, as an older version wrote it")
    if kind is DenoiseState:
        for name in ("history", "audio_history", "chunks"):
            terms = fields.get(name, {})
            fields[name] = tuple(terms[str(i)] for i in range(len(terms)))
        fields["step"] = int(arrays["step"].item())
        fields["own_noise"] = "own_noise" in arrays
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: content for name, content in fields.items() if name in known})


def _rebuild_value(
    kind: type[Value], tensors: dict[str, Array], metadata: dict[str, str], source: str
) -> tuple[Value, dict[str, Any]]:
    name = metadata.get("type", "something else")
    if name != kind.__name__:
        raise InvalidInput(f"{source} holds {name}, not {kind.__name__}; give the file that the previous stage wrote")
    return rebuild(kind, tensors), json.loads(metadata["notes"])


def write_whole(path: Path, content: bytes) -> None:
    """Write a file completely or not at all; raises `OutputError`."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        raise OutputError(f"can't write {path} ({error}); free some space, or choose another folder") from None
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` completely or not at all; raises `OutputError`."""
    write_whole(path, f"{json.dumps(content, indent=2, ensure_ascii=False)}\n".encode())
