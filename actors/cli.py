"""The `wan-tpu` command. It imports what a command needs when that is run: `wan-tpu generate` never imports Ray."""

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence

from cluster.errors import ClusterError

# Those of one machine, in wan_tpu/cli.py.
ONE_MACHINE = {
    "generate": "make one video from a prompt and, for image-to-video models, an image",
    "stage1": "only the encoder: request -> embeddings",
    "stage2": "only the experts: embeddings -> latents",
    "stage3": "only the decoder: latents -> video",
}
# command -> module, function in it, what it does
CLUSTER = {
    "cluster": ("actors.commands.cluster", "cluster", "start, show and stop an emulated cluster; show a real one"),
    "pipeline": ("actors.commands.pipeline", "pipeline", "bring a pipeline up on a cluster, and take it down"),
    "submit": ("actors.commands.submit", "submit", "have a cluster make every video of a manifest, as a job"),
    "status": ("actors.commands.status", "status", "show what the pipeline of a cluster is doing"),
    "drive": ("actors.commands.drive", "drive", "what submit runs on the cluster: the batch's driver"),
    "serve": ("actors.commands.serve", "serve", "put a pipeline behind HTTP: OpenAI's videos API"),
    "keys": ("actors.commands.keys", "keys", "make, show and revoke API keys of the online service"),
    "batch": ("actors.commands.batch", "batch", "make every video of a manifest in this process"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `wan-tpu COMMAND ...`; return the exit code."""
    parser = argparse.ArgumentParser(prog="wan-tpu", description="Video generation on TPUs (CPU and CUDA work too).")
    parser.add_argument("--version", action="version", version=importlib.metadata.version("wan-tpu"))
    listed = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about in (ONE_MACHINE | {name: about for name, (_, _, about) in CLUSTER.items()}).items():
        listed.add_parser(name, help=about, add_help=False)
    argv = list(sys.argv[1:] if argv is None else argv)
    command = parser.parse_args(argv[:1]).command
    if command in ONE_MACHINE:
        from wan_tpu import cli

        return cli.main(argv)
    module, function, _ = CLUSTER[command]
    return run(getattr(importlib.import_module(module), function), argv[1:])


def run(command: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> int:
    """Run one command; turn what it raises on purpose into one line on stderr and an exit code (2 for bad input)."""
    try:
        return command(argv) or 0
    except _on_purpose() as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _on_purpose() -> tuple:
    loaded = sys.modules.get("wan_tpu.errors")  # what hasn't imported it can't raise from it
    return (ClusterError, loaded.WanTpuError) if loaded else (ClusterError,)


if __name__ == "__main__":
    sys.exit(main())
