"""The process that parses one untrusted body, image or video, and can reach nothing else.

python -m actors.api.untrusted.reader_process LIMITS

LIMITS are `ReaderLimits` as JSON.

stdin   a line with the content type of the file
stdout  a line with the fields, the digests and sizes of the files, and the kinds of references
stdin   a line {"name": ..., "height": ..., "width": ..., "slack": ...} for each file that is wanted
stdout  its length in eight bytes, its frames in eight bytes, and the file, upright and of that size, as a PNG or an mp4
        that this program has encoded itself, without any metadata
stdin   {"name": END} for the last frame of the video that was wanted before
stdout  likewise

A reference is wanted as {"kind": ..., "height": ..., "width": ..., "with_sound": ..., "seconds": ...}; it becomes a
PNG, an mp4, or a wav of the first seconds.
A video is cut to its first frames if {"frames": ..., "step": ...} are wanted, or brought to the rate {"fps": ...}.

It exits with 0, or with REFUSED and a reason for people on stderr.
"""

import hashlib
import io
import json
import os
import resource
import sys
from typing import TYPE_CHECKING, Any

from actors.api.untrusted.body_parts import Parts, split_body
from actors.api.untrusted.reader_limits import ReaderLimits
from actors.api.untrusted.references import IMAGE, REFERENCES, VIDEO
from wan_tpu.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL import Image

    from actors.api.untrusted.clips import Upload

REFUSED = 3
LENGTH = 8  # Bytes of each number before a file.
END = "end"
_NICE = 5  # Lower priority than the processes that answer HTTP.


def main() -> int:
    """Serve one file, within limits that the operating system enforces."""
    limits = ReaderLimits(**json.loads(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory, limits.memory))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, max(limits.cpu_s, limits.video_cpu_s)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # It writes no files.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICE)
    try:
        _serve(limits)
    except InvalidRequest as error:
        print(json.dumps([str(error), error.field]), file=sys.stderr)
        return REFUSED
    except MemoryError:
        print(json.dumps(["it takes more memory to read than it gets; send it smaller", None]), file=sys.stderr)
        return REFUSED
    return 0


def _serve(limits: ReaderLimits) -> None:
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    with open(limits.file, "rb") as file:
        parts = split_body(json.loads(stdin.readline()), file.read())
    files = _Files(parts, limits)
    answer = {
        "text": parts.text,
        "uploads": {name: hashlib.sha256(content).hexdigest() for name, content in parts.uploads.items()},
        "sizes": files.sizes,
        "kinds": files.kinds,
    }
    stdout.write(json.dumps(answer).encode() + b"\n")
    stdout.flush()
    while parts.uploads and (line := stdin.readline()):
        content, frames = files.make(**json.loads(line))
        stdout.write(len(content).to_bytes(LENGTH, "big") + frames.to_bytes(LENGTH, "big") + content)
        stdout.flush()


class _Files:
    """The images and the video of a body."""

    def __init__(self, parts: Parts, limits: ReaderLimits) -> None:
        """Open all of them; raises `InvalidRequest`."""
        self._limits = limits
        references = {name: file for name, file in parts.uploads.items() if name.startswith(REFERENCES)}
        self._images = {
            name: open_image(content, name)
            for name, content in parts.uploads.items()
            if name not in (VIDEO, *references)
        }
        self.sizes = {name: [image.height, image.width] for name, image in self._images.items()}
        self._video: Upload | None = None
        self._converted: tuple[bytes, int] | None = None
        if (content := parts.uploads.get(VIDEO)) is not None:
            from actors.api.untrusted import clips  # Imported within the limits.

            self._video = clips.Upload(content, limits, limits.scratch[0])
            self.sizes[VIDEO] = list(self._video.size)
        # Nine pictures of a phone take eight seconds. `most_s` can't be raised.
        _, most_s = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (min(most_s, limits.cpu_s * (1 + len(references))), most_s))
        self._scratch = dict(zip(references, limits.scratch[1:], strict=False))
        self._references = {name: self._look(name, content) for name, content in references.items()}
        self.kinds = {name: kind for name, (kind, _) in self._references.items()}

    def make(self, name: str, **options: Any) -> tuple[bytes, int]:
        """Return a file in the requested form, and its number of frames; raises `InvalidRequest`."""
        if name in self._references:
            return self._make_reference(name, **options)
        if name == END and self._video is not None and self._converted is not None:
            return encode_png(self._video.read_end(*self._converted)), 1
        if name == VIDEO and self._video is not None:
            if "frames" in options:
                return self._video.cut(**options), options["frames"]
            self._converted = self._video.convert(**options)
            return self._converted
        from wan_tpu.media.image import fit_image  # Imported within the limits.

        return encode_png(fit_image(self._images.pop(name), **options)), 1

    def _look(self, name: str, content: bytes) -> tuple[str, bytes]:
        """Return what a reference is, an image, a video or a sound, whichever it can be read as, and its content."""
        from actors.api.untrusted import clips

        scratch = self._scratch[name]
        try:
            image = open_image(content, REFERENCES)
        except InvalidRequest:
            try:
                self.sizes[name] = list(clips.Upload(content, self._limits, scratch, REFERENCES).size)
            except InvalidRequest as error:
                if clips.SoundUpload(content, self._limits, scratch, REFERENCES).has_frames():
                    raise InvalidRequest(str(error), REFERENCES) from None
                self.sizes[name] = [0, 0]
                return "audio", content
            return "video", content
        self.sizes[name] = [image.height, image.width]
        return "image", content

    def _make_reference(
        self, name: str, kind: str, height: int, width: int, *, with_sound: bool, seconds: float
    ) -> tuple[bytes, int]:
        """Return a reference as a PNG or an mp4 of a size, or as a wav, and its number of frames."""
        from PIL import Image

        from actors.api.untrusted import clips

        (_, content), scratch = self._references.pop(name), self._scratch[name]
        if kind == "audio":
            return clips.SoundUpload(content, self._limits, scratch, REFERENCES).convert(seconds), 0
        if kind == "video":
            try:
                video = clips.Upload(content, self._limits, scratch, REFERENCES)
                return video.shorten(height=height, width=width, sound=with_sound)
            except InvalidRequest as error:
                raise InvalidRequest(str(error), REFERENCES) from None
        image = open_image(content, REFERENCES)
        fitted = image if image.size == (width, height) else image.resize((width, height), Image.Resampling.LANCZOS)
        return encode_png(fitted), 1


def open_image(content: bytes, name: str = IMAGE) -> "Image.Image":
    """Return an image, upright and in RGB; raises `InvalidRequest` with the name of its field."""
    from PIL import AvifImagePlugin

    from wan_tpu.media.image import KINDS, decode_image  # Imported within the limits.

    # The default is a thread for each core, whose stacks alone would exceed the memory limit.
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1

    if not content:
        raise InvalidRequest(f"the image is empty; send a {KINDS} file", name)
    try:
        image = decode_image(io.BytesIO(content), "upload")
    except InvalidRequest as error:
        raise InvalidRequest(str(error), name) from None
    except MemoryError:
        raise
    except Exception as error:  # Decoders raise all kinds of exceptions on broken files.
        kind = type(error).__name__
        raise InvalidRequest(f"image upload is damaged ({kind}); save it again as PNG or JPEG", name) from None
    image.info.clear()  # Drops what the file says about its author, its location and its colours.
    return image


def encode_png(image: "Image.Image") -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(main())
