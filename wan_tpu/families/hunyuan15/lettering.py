"""Which text of a prompt becomes lettering, as far as a warning needs it. It imports neither torch nor JAX."""

import re
from collections.abc import Iterator

# The rule of diffusers' pipeline, which `text.tokenize_glyphs` follows by calling it: a pair of straight marks, or a
# left and a right curly one, without a line break between them.
_QUOTED = re.compile(r"\"(.*?)\"|“(.*?)”")
_MARKS = '"“”'


def find_doubtful_marks(field: str, prompt: str) -> Iterator[str]:
    """Yield warnings about quotation marks that may enclose another text than was meant."""
    if left := [mark for mark in _QUOTED.sub("", prompt) if mark in _MARKS]:
        yield (
            f"{field} has {len(left)} of the quotation marks {' '.join(dict.fromkeys(left))} without a counterpart in "
            "the same line, so that other text than you mean may become lettering; pair all marks"
        )
    for quoted in _QUOTED.finditer(prompt):
        before = prompt[: quoted.start()]
        if before[-1:].isdigit() and quoted[0].startswith('"'):
            number = re.split(r"\s", before)[-1]
            yield (
                f"the mark after {number} in {field} begins a quotation, and {quoted[0]} becomes lettering; if it "
                f"stands for inches, write {number}″ or {number} inches"
            )
