"""Show previews of `wan-tpu generate`: as a file beside the video, and in terminals that can show pictures.

Sources: iterm2.com/documentation-images.html; sw.kovidgoyal.net/kitty/graphics-protocol.
"""

import base64
import contextlib
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from wan_tpu.data import write_whole
from wan_tpu.previews.watching import Preview

_ITERM_PROGRAMS = ("iTerm.app", "WezTerm", "mintty")
_KITTY_TERMS = ("xterm-kitty", "xterm-ghostty")
_CHUNK = 4096  # The most characters of a picture in one of kitty's commands.


class ShownPreviews:
    """Writes each preview over the one before, and shows it in the terminal."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        """Show previews of one video.

        Args:
            path: The file, a PNG.
            keep: Whether the file stays when the video is there.
        """
        self._path, self._keep = path, keep
        self._is_named = False

    def show(self, preview: Preview) -> None:
        """Show a preview; raises `OutputError` if the file can't be written."""
        png = encode_png(preview.picture)
        write_whole(self._path, png)
        text = "" if self._is_named else f"{'preview:':<15}{self._path}, after each quarter of the steps\n"
        self._is_named = True
        if sys.stdout.isatty():
            text += draw_inline(png, os.environ)
        with tqdm.external_write_mode(file=sys.stdout):  # Otherwise the progress bar would be in the way.
            sys.stdout.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        """Remove the file, unless it is to be kept."""
        if not self._keep:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)


def encode_png(picture: Image.Image) -> bytes:
    """Return a picture as a PNG."""
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()


def draw_inline(png: bytes, environment: Mapping[str, str]) -> str:
    """Return what makes a terminal show a picture, or "" for one that can't.

    Args:
        png: The picture.
        environment: The process's environment variables, which say what the terminal is.
    """
    term, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "")
    if "TMUX" in environment or term.startswith(("screen", "tmux")):  # They swallow the commands.
        return ""
    content = base64.b64encode(png).decode()
    if term in _KITTY_TERMS or "KITTY_WINDOW_ID" in environment:
        chunks = [content[start : start + _CHUNK] for start in range(0, len(content), _CHUNK)]
        # a=T: transmit and display; f=100: PNG; q=2: no answers; m=1: more follows.
        heads = ["a=T,f=100,q=2,"] + [""] * (len(chunks) - 1)
        more = [1] * (len(chunks) - 1) + [0]
        commands = [f"\x1b_G{head}m={m};{chunk}\x1b\\" for head, m, chunk in zip(heads, more, chunks, strict=True)]
        return "".join(commands) + "\n"
    if program in _ITERM_PROGRAMS or environment.get("LC_TERMINAL") == "iTerm2":
        return f"\x1b]1337;File=inline=1;size={len(png)}:{content}\a\n"
    return ""
