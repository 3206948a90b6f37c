#!/usr/bin/env python3
"""One stage in a process of its own: see wan_tpu/commands/staged.py."""

import sys

from wan_tpu.cli import run
from wan_tpu.commands.staged import denoise

if __name__ == "__main__":
    sys.exit(run(denoise))
