#!/usr/bin/env python3
"""Make one video: see `wan-tpu generate --help`."""

import sys

from wan_tpu.cli import run
from wan_tpu.commands.generate import generate

if __name__ == "__main__":
    sys.exit(run(generate))
