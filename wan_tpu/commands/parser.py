"""The parser of all commands; it imports nothing, so that `--help` is there at once."""

import argparse
from typing import Any, NoReturn

from wan_tpu.errors import InvalidInput


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments like all bad input: in one line. Takes no abbreviations, which a later option breaks."""

    def __init__(self, **given: Any) -> None:
        """Take what `ArgumentParser` takes."""
        super().__init__(allow_abbrev=False, **given)

    def error(self, message: str) -> NoReturn:
        """Raise `InvalidInput`."""
        raise InvalidInput(f"{message}; see {self.prog} --help")
