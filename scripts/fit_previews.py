"""Fit the colours of previews to a model's VAE ahead of its first video, and print them.

python scripts/fit_previews.py examples/small-wan2.2-i2v
"""

import argparse

from wan_tpu.families import open_checkpoint
from wan_tpu.families.model import open_model
from wan_tpu.previews.colours import load_colours


def main() -> None:
    """Fit, keep and print the map from latents to colours."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="diffusers directory, here or in gs://, or hub id")
    colours = load_colours(open_model(open_checkpoint(parser.parse_args().model)))
    print("channel      red    green     blue")
    for name, row in [*enumerate(colours.weights), ("bias", colours.bias)]:
        print(f"{name:>7} " + " ".join(f"{value:8.4f}" for value in row))
    print(f"root mean square of the error in the fit: {colours.error:.3f} of 1")


if __name__ == "__main__":
    main()
