#!/usr/bin/env python3
"""Train the adapters that are shipped with the small model, each a pair for its two experts: zigzag, four-steps.

About half an hour on two cores.
"""

import argparse
from pathlib import Path

from demo_model.adapters import CHECKPOINT, train_four_steps, train_zigzag

KINDS = {"zigzag": train_zigzag, "four-steps": train_four_steps}


def main() -> None:
    """Train those that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="both when left out")
    parser.add_argument("--folder", type=Path, default=CHECKPOINT / "adapters", help="default %(default)s")
    parser.add_argument("--steps", type=int, help="of each expert, in place of the plan's")
    parser.add_argument("--scenes", type=int, help="in place of the plan's")
    args = parser.parse_args()
    overrides = {name: value for name, value in (("steps", args.steps), ("scenes", args.scenes)) if value is not None}
    for kind in args.kinds or KINDS:
        KINDS[kind](args.folder, **overrides)


if __name__ == "__main__":
    main()
