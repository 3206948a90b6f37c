"""A reference of a request: an image, a video or a sound that the model looks at or hears. It imports no JAX, no torch.

A reference is measured when the request is created: its sizes decide the shapes of a request's programs, and they stay
when the file itself is left out, which only the encoder needs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from PIL import Image

from wan_tpu.errors import InvalidRequest
from wan_tpu.media.image import load_image
from wan_tpu.media.video_content import VideoContent
from wan_tpu.suggest import did_you_mean
from wan_tpu.tail import Tail, find_sample

Kind = Literal["image", "video", "audio", "continued", "soundtrack"]
KINDS: tuple[str, ...] = get_args(Kind)
# Kinds of the end of the video that the new one continues, which no text encoder reads: as it was denoised (a `Tail`),
# and as a file shows it.
TAIL, CONTINUED = BEGINNINGS = "tail", "continued"
GOAL = "goal"  # The kind of a `Tail` that the new video ends with, because a later one goes on from it.
ENDS = (*BEGINNINGS, GOAL)
SOUNDTRACK = "soundtrack"  # The kind of a sound that becomes the video's, unchanged, and that the video follows.
UNREAD = (*ENDS, SOUNDTRACK)  # Kinds that no text encoder reads.
# Frames that are read of the end of such a file, before its model is known: as many as any model continues with.
# `Reference.keep_last` drops the others.
ENDING = 25
FPS = 24  # Frames per second at which a reference video is read.
SECONDS = 16  # Only the beginning of a video or of a sound is measured: no model reads more.
TRACK_SECONDS = 61  # The same of a soundtrack: the longest video, and a second that shows that the sound is cut.
FORM = "KIND:PATH, with image, video, audio, continued or soundtrack for KIND"
_FIELDS = "kind", "source"
_MEASURES = "height", "width", "frames", "samples", "sample_rate"


@dataclasses.dataclass(frozen=True)
class Reference:
    """One reference of a request, measured."""

    kind: str
    # An RGB image, or the path or the content of a file; None where only its measures are needed.
    source: Image.Image | str | VideoContent | Tail | None = dataclasses.field(repr=False)
    height: int = 0  # Pixels of an image or of a video's frames; 0 for a sound.
    width: int = 0
    frames: int = 0  # Of a video at `FPS`, in its first `SECONDS`.
    samples: int = 0  # Of each channel of a sound, or of a video's sound, in these seconds.
    sample_rate: int = 0  # Samples per second; 0 without sound.

    def __str__(self) -> str:
        size = f", {self.width}x{self.height}" if self.height else ""
        frames = f", {self.frames} frames" if self.frames else ""
        sound = f", {self.samples} samples at {self.sample_rate} Hz" if self.samples else ""
        name = self.source.info.get("source", "") if isinstance(self.source, Image.Image) else self.source or ""
        return f"{self.kind} {name}{size}{frames}{sound}".replace(" ,", ",")

    @property
    def path(self) -> str | None:
        """The path of its file; None if it came otherwise."""
        source = self.source.path if isinstance(self.source, Tail) else self.source
        if isinstance(source, Image.Image):
            source = source.info.get("source")
        return source if isinstance(source, str) else None

    @property
    def nbytes(self) -> int:
        """The bytes of its content, if that is in memory."""
        if isinstance(self.source, Image.Image):
            return 3 * self.source.height * self.source.width
        if isinstance(self.source, VideoContent):
            return len(self.source.content)
        return self.source.nbytes if isinstance(self.source, Tail) else 0

    def to_json(self) -> dict[str, Any]:
        """Return its kind, its measures and its file's name, as records have them."""
        fields = {name: value for name in _MEASURES if (value := getattr(self, name))}
        return {"kind": self.kind, **({} if self.path is None else {"source": self.path}), **fields}

    def keep_last(self, frames: int) -> "Reference":
        """Return the end of a video's file with only its last frames, and their sound."""
        first = self.frames - frames
        skipped = find_sample(first, self.sample_rate, FPS)
        source = self.source
        if isinstance(source, Tail) and source.pixels is not None:
            sound = None if source.sound is None else source.sound[:, skipped:]
            source = dataclasses.replace(source, frames=frames, pixels=source.pixels[first:], sound=sound)
        return dataclasses.replace(self, source=source, frames=frames, samples=max(0, self.samples - skipped))

    def without_source(self) -> "Reference":
        """Return its measures only; of a tail, its sound as well, which the decoder needs."""
        source = self.source.without_latents() if isinstance(self.source, Tail) else None
        return dataclasses.replace(self, source=source)


def find_tail(references: Sequence[Reference] | None) -> Reference | None:
    """Return the end of the video that a request continues, if it is among its references."""
    return next((reference for reference in references or () if reference.kind in BEGINNINGS), None)


def find_soundtrack(references: Sequence[Reference] | None) -> Reference | None:
    """Return the sound that a request's video follows, if it is among its references."""
    return next((reference for reference in references or () if reference.kind == SOUNDTRACK), None)


def find_goal(references: Sequence[Reference] | None) -> Reference | None:
    """Return the end that a request's video leads to, if it is among its references."""
    return next((reference for reference in references or () if reference.kind == GOAL), None)


def count_read(references: Sequence[Reference] | None) -> int:
    """Return how many references the text encoder reads with the prompt."""
    return sum(reference.kind not in UNREAD for reference in references or ())


def open_reference(kind: str, source: Any) -> Reference:
    """Decode an image, or measure a video or a sound.

    Args:
        kind: One of `KINDS`.
        source: A path; for an image also a `PIL.Image` or uint8 [H, W, 3], else also a file's content.

    Raises:
        InvalidRequest: It can't be read as what it should be.
        Unavailable: The disk or the machine fails.
    """
    # ffmpeg is only needed for some requests.
    from wan_tpu.media.encoding import exact_rate
    from wan_tpu.media.reading import open_video, read_ending, read_sound

    if kind not in KINDS:
        raise InvalidRequest(
            f"a reference's kind is {kind!r}{did_you_mean(str(kind), KINDS)}; choose one of {', '.join(KINDS)}",
            "references",
        )
    if kind == "image":
        picture = load_image(source, "a reference")
        return Reference(kind, picture, picture.height, picture.width)
    if not isinstance(source, VideoContent):
        if not isinstance(source, str | Path) or not Path(source).is_file():
            raise InvalidRequest(
                f"a reference's source {str(source)[:200]!r} is not a file; give the path of one", "references"
            )
        source = str(Path(source).absolute())
    height = width = frames = samples = rate = 0
    has_sound = True
    try:
        if kind == CONTINUED:
            pixels, ending = read_ending(source, fps=FPS, count=ENDING)
            frames, height, width, _ = pixels.shape
            sound, rate = (None, 0) if ending is None else ending
            path = source if isinstance(source, str) else None
            tail = Tail(None, sound, height, width, frames, 0, rate, pixels, path)
            return Reference(kind, tail, height, width, frames, tail.samples, rate)
        if kind == SOUNDTRACK:
            sound, rate = read_sound(source, TRACK_SECONDS)
            track = Tail(None, sound, 0, 0, 0, 0, rate, path=source if isinstance(source, str) else None)
            return Reference(kind, track, samples=track.samples, sample_rate=rate)
        if kind == "video":
            with open_video(source) as shown:
                height, width, has_sound = shown.height, shown.width, shown.has_sound
                frames = shown.count_frames(exact_rate(FPS), most=FPS * SECONDS)
        if has_sound:
            sound, rate = read_sound(source, SECONDS)
            samples = sound.shape[1]
    except InvalidRequest as error:
        raise InvalidRequest(str(error), "references") from None
    return Reference(kind, source, height, width, frames, samples, rate if samples else 0)


def parse_reference(reference: object) -> Reference:
    """Read a reference from its text, KIND:PATH, or from its kind and its source. A `Tail` is a reference as well.

    Raises:
        InvalidRequest: It is none of these, or its file can't be read.
    """
    if isinstance(reference, Reference):
        return reference
    if isinstance(reference, Tail):
        sizes = reference.height, reference.width, reference.frames
        return Reference(TAIL, reference, *sizes, reference.samples, reference.rate)
    if isinstance(reference, str):
        kind, colon, path = reference.partition(":")
        if not colon or not path:
            raise InvalidRequest(f"{reference[:200]!r} isn't a reference; give {FORM}", "references")
        return open_reference(kind, path)
    if isinstance(reference, Mapping):
        if set(reference) != set(_FIELDS):
            raise InvalidRequest(
                f"a reference has the fields {', '.join(map(str, reference)) or 'of nothing'}; give {FORM}, or "
                f"{' and '.join(_FIELDS)}",
                "references",
            )
        return open_reference(*(reference[name] for name in _FIELDS))
    raise InvalidRequest(f"a reference is a {type(reference).__name__}; give {FORM}", "references")


def restore_references(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored request's fields with its references as `Reference.to_json` wrote them: measured, without files.

    Raises:
        InvalidRequest: A later version wrote them, with other fields.
    """
    stored = fields.get("references") or ()
    if unknown := sorted({name for reference in stored for name in reference} - {*_FIELDS, *_MEASURES}):
        raise InvalidRequest(
            f"a reference has the fields {', '.join(unknown)} of a later version; use that", "references"
        )
    restored = [Reference(**{**reference, "source": None}) for reference in stored]
    return {**fields, "references": restored} if restored else dict(fields)


def parse_references(references: object) -> tuple[Reference, ...] | None:
    """Read a request's references, in order; None for an empty list. Raises `InvalidRequest`."""
    if not isinstance(references, list | tuple):
        raise InvalidRequest(f"references is a {type(references).__name__}; give a list of {FORM}", "references")
    return tuple(map(parse_reference, references)) or None
