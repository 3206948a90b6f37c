"""Tables that commands print for people."""

from collections.abc import Iterable, Sequence

WIDTH = 100  # Characters of a line.


def as_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the header and the rows as aligned lines. Numbers and their headings are right-aligned."""
    body = [list(row) for row in rows]
    columns = list(zip(header, *body, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numbers = [all(cell.replace(".", "", 1).isdigit() for cell in cells) for _, *cells in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numbers, strict=True)
        ).rstrip()
        for row in [list(header), *body]
    )
