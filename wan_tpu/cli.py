"""The `wan-tpu` command: `generate` makes a video, `stage1` to `stage3` do the same with files between them."""

import _thread
import argparse
import importlib.metadata
import sys
import warnings
from collections.abc import Callable, Sequence

from wan_tpu.errors import WanTpuError


def main(argv: Sequence[str] | None = None) -> int:
    """Run `wan-tpu COMMAND ...`; return the exit code."""
    from wan_tpu.commands import generate, staged  # here: they bring JAX and torch, which `run` alone needs not

    commands = {
        "generate": (generate.generate, "make one video from a prompt and, for image-to-video models, an image"),
        "stage1": (staged.encode, "only the encoder: request -> embeddings"),
        "stage2": (staged.denoise, "only the experts: embeddings -> latents"),
        "stage3": (staged.decode, "only the decoder: latents -> video"),
    }
    parser = argparse.ArgumentParser(prog="wan-tpu", description="Video generation on TPUs (CPU and CUDA work too).")
    parser.add_argument("--version", action="version", version=importlib.metadata.version("wan-tpu"))
    listed = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, about) in commands.items():
        listed.add_parser(name, help=about, add_help=False)
    argv = list(sys.argv[1:] if argv is None else argv)
    command = parser.parse_args(argv[:1]).command
    return run(commands[command][0], argv[1:])


def run(command: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> int:
    """Run one command; turn what it raises into one line on stderr and an exit code (2 for bad input)."""
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    sys.unraisablehook = _keep_interrupt
    try:
        command(sys.argv[1:] if argv is None else argv)
    except WanTpuError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: nothing half-written was left behind", file=sys.stderr)
        return 130
    return 0


def _keep_interrupt(unraisable: "sys.UnraisableHookArgs") -> None:
    """Raise Ctrl-C again where Python would drop it: in a callback of the garbage collector, such as JAX's."""
    if unraisable.exc_type is KeyboardInterrupt:
        _thread.interrupt_main()
    else:
        sys.__unraisablehook__(unraisable)
