"""The parser of all commands; it imports nothing of them, so that `--help` is there at once."""

import argparse
from collections.abc import Mapping
from typing import Any, NoReturn

from wan_tpu.errors import InvalidInput

PRECISIONS = ("bfloat16", "float32", "int8", "float8", "int8-attention", "float8-attention")


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments like all bad input: in one line. Takes no abbreviations, which a later option breaks."""

    def __init__(self, **given: Any) -> None:
        """Take what `ArgumentParser` takes."""
        super().__init__(allow_abbrev=False, **given)

    def error(self, message: str) -> NoReturn:
        """Raise `InvalidInput`."""
        raise InvalidInput(f"{message}; see {self.prog} --help")

    def given(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the arguments that aren't their defaults, by name."""
        return {name: value for name, value in vars(args).items() if value != self.get_default(name)}


def add_precision(to: argparse._ActionsContainer, default: str | None = "bfloat16", about: str = "") -> None:
    """Add --precision, by its older name --dtype too."""
    to.add_argument(
        "--precision",
        "--dtype",
        dest="dtype",
        choices=PRECISIONS,
        default=default,
        help=f"{about or 'of weights and activations'}; int8 (v5e, v5p, v6e) and float8 (v7x): the linear layers of "
        "transformers in 8 bits, all else in bfloat16; with -attention its logits, too; "
        f"default {default or 'bfloat16'}",
    )


def words(given: Mapping[str, Any]) -> list[str]:
    """Return the command line of such arguments: True is a flag, a list an option that is given several times."""
    options = [(name, one) for name, value in given.items() for one in (value if isinstance(value, list) else [value])]
    return [word for name, value in options for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])]
