"""The `wan-tpu` command. A command's imports come when it is run, so that `wan-tpu generate` never imports Ray."""

import atexit
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from actors.interrupts import end_on_sigterm
from cluster.errors import ClusterError
from cluster.layout import list_shipped
from wan_tpu.cli import run
from wan_tpu.commands.parser import Parser, all_actions, parser_of
from wan_tpu.errors import InvalidInput
from wan_tpu.versions import summarize_versions

# Of each command: its module, its function there, and the help text.
COMMANDS = {
    "doctor": ("actors.commands.doctor", "doctor", "check this machine's chips, kernels, network and disk"),
    "generate": ("wan_tpu.commands.generate", "generate", "make one video from a prompt or an image"),
    "models": ("wan_tpu.commands.models", "models", "list the published models, and what each makes"),
    "layouts": ("actors.commands.layouts", "layouts", "list the shipped layouts: slices, chips, models"),
    "plan": ("actors.planning.plan", "plan", "say what fits a slice, how long it takes, and what videos cost"),
    "batch": ("actors.commands.batch", "batch", "make every video of a manifest in this process"),
    "stage1": ("wan_tpu.commands.staged", "encode", "run only the encoder, and write its embeddings"),
    "stage2": ("wan_tpu.commands.staged", "denoise", "run only the experts, and write the latents"),
    "stage3": ("wan_tpu.commands.staged", "decode", "run only the decoder, and write the video"),
    "calibrate": ("wan_tpu.commands.calibrate", "calibrate", "measure the curve by which MagCache skips steps"),
    "weights": ("wan_tpu.commands.weights", "weights", "convert a checkpoint to what slices read fastest"),
    "cluster": ("actors.commands.cluster", "cluster", "start and stop an emulated cluster"),
    "pipeline": ("actors.commands.pipeline", "pipeline", "bring a pipeline up on a cluster, and take it down"),
    "submit": ("actors.commands.submit", "submit", "have a cluster make every video of a manifest, as a job"),
    "drive": ("actors.commands.drive", "drive", "what submit runs on the cluster: the batch's driver"),
    "status": ("actors.commands.status", "status", "show what the pipeline of a cluster is doing"),
    "profile": ("actors.commands.profile", "profile", "trace what a slice of a running pool computes"),
    "serve": ("actors.commands.serve", "serve", "put a pipeline behind HTTP: the /v1/videos API"),
    "keys": ("actors.commands.keys", "keys", "make, show and revoke API keys of the online service"),
    "manifests": ("actors.provision.manifests", "manifests", "print a layout as Kubernetes objects, for kubectl apply"),
    "hosts": ("actors.provision.hosts", "hosts", "write what creates a layout's machines as TPU VMs"),
    "completion": ("actors.cli", "completion", "print a script with which a shell completes commands and options"),
}
SHELLS = ("bash", "fish", "tcsh", "zsh")
# The extra of pyproject.toml that has a command's requirements beyond the core.
EXTRAS = {
    **dict.fromkeys(("cluster", "drive", "pipeline", "profile", "status", "submit"), "cluster"),
    **dict.fromkeys(("keys", "serve"), "serve"),
    "plan": "plan",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `wan-tpu COMMAND ...`; return the exit code."""
    gc.set_threshold(20_000)  # As on a slice's hosts (cluster/gang/host_actor.py).
    return run(_run_command, argv, expected=(ClusterError,))


def _run_command(argv: Sequence[str]) -> int | None:
    parser = _build_parser(lambda prog, of: Parser(prog=prog, add_help=False))
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    command = parser.parse_args(argv[:1]).command
    with end_on_sigterm():
        try:
            return find_command(command)(argv[1:])
        except ModuleNotFoundError as missing:
            if command not in EXTRAS or not missing.name:
                raise
            raise InvalidInput(
                f"wan-tpu {command} needs {missing.name}, which isn't installed: "
                f"pip install 'wan-tpu[{EXTRAS[command]}]'"
            ) from missing


def find_command(name: str) -> Callable[[Sequence[str]], int | None]:
    """Return the function of a command."""
    module, function, _ = COMMANDS[name]
    command: Callable[[Sequence[str]], int | None] = getattr(importlib.import_module(module), function)
    return command


def completion(argv: Sequence[str]) -> None:
    """Print a script that completes commands, options and their values: wan-tpu completion bash.

    Once it is written to where the shell looks, Tab starts no Python.
    """
    parser = Parser(prog="wan-tpu completion", description=completion.__doc__)
    parser.add_argument("shell", choices=SHELLS, help="that is to be taught")
    args = parser.parse_args(argv)

    import shtab

    # In bash, layouts are completed by the names of shipped ones and by files.
    function = f"_wan_tpu_layouts() {{ compgen -W '{' '.join(list_shipped())}' -- $1; compgen -f -- $1; }}"
    layouts = {**shtab.FILE, "bash": "_wan_tpu_layouts", "preamble": {"bash": function}}
    whole = _build_parser(lambda prog, of: parser_of(find_command(of)))
    for action in all_actions(whole):
        if action.choices is None and action.nargs != 0 and action.type not in (int, float):
            names_layout = action.dest in ("layout", "emulate")
            action.complete = layouts if names_layout else shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(whole, args.shell))


def _build_parser(parser_class: Any) -> Parser:
    """Return the parser of all commands; `parser_class` is called with `prog` and `of` for that of one command."""
    description = "Video generation on TPUs. It also runs on CPUs, but not on GPUs."
    parser = Parser(prog="wan-tpu", description=description)
    parser.add_argument("--version", action="version", version=summarize_versions(), help="show the versions and exit")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=parser_class, help="each has a --help"
    )
    for name, (_, _, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary, of=name)
    return parser


def entry() -> NoReturn:
    """Run `wan-tpu COMMAND ...`, and end its process as soon as every exit function has run.

    Python would go on to collect garbage in all of torch, for two seconds, and to unload the C++ libraries while JAX
    may still compute in its threads, as after Ctrl-C.
    """
    code = 1

    def end() -> None:
        with contextlib.suppress(OSError):  # Nobody reads any more.
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    atexit.register(end)  # Registered first, so that it runs last.
    try:
        code = main()
    except SystemExit as leaving:  # Raised by argparse.
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    sys.exit(code)


if __name__ == "__main__":
    entry()
