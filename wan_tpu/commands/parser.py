"""The parser of all commands; it imports nothing, so that `--help` is there at once."""

import argparse
from typing import NoReturn

from wan_tpu.errors import InvalidInput


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments like all bad input: in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise `InvalidInput`."""
        raise InvalidInput(f"{message}; see {self.prog} --help")
