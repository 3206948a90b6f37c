"""The `wan-tpu` command. A command's imports come when it is run, so that `wan-tpu generate` never imports Ray."""

import atexit
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from actors.interrupts import end_on_sigterm
from cluster.errors import ClusterError
from wan_tpu.cli import run
from wan_tpu.commands.importing import heavy_imports
from wan_tpu.commands.parser import Parser, all_arguments, parser_of
from wan_tpu.errors import InvalidInput
from wan_tpu.suggest import did_you_mean
from wan_tpu.versions import summarize_versions

# The commands by what they are for. Of each command: its module, its function there, and the help text.
GROUPS = {
    "make videos": {
        "generate": (
            "wan_tpu.commands.generate",
            "generate",
            "make a video from a prompt or an image, or one after another",
        ),
        "models": ("wan_tpu.commands.models", "models", "list the published models, and what each makes"),
        "batch": ("actors.commands.batch", "batch", "make every video of a manifest in this process"),
        "submit": ("actors.commands.submit", "submit", "have a cluster make every video of a manifest, as a job"),
    },
    "serve": {
        "serve": ("actors.commands.serve", "serve", "put a model behind HTTP: a web page and the /v1/videos API"),
        "jobs": ("actors.commands.jobs", "jobs", "list, show and cancel the jobs of a service"),
        "keys": ("actors.commands.keys", "keys", "make, show and revoke API keys of a service"),
    },
    "operate": {
        "doctor": ("actors.commands.doctor", "doctor", "check this machine's chips, kernels, network and disk"),
        "plan": ("actors.planning.plan", "plan", "say what fits a slice, how long it takes, and what videos cost"),
        "layouts": ("actors.commands.layouts", "layouts", "list the shipped layouts: slices, chips, models"),
        "weights": ("wan_tpu.commands.weights", "weights", "convert a checkpoint to what slices read fastest"),
        "cluster": ("actors.commands.cluster", "cluster", "start and stop an emulated cluster"),
        "pipeline": ("actors.commands.pipeline", "pipeline", "bring a pipeline up on a cluster, and take it down"),
        "status": ("actors.commands.status", "status", "show what the pipeline of a cluster is doing"),
        "profile": ("actors.commands.profile", "profile", "trace what a slice of a running pool computes"),
        "manifests": (
            "actors.provision.manifests",
            "manifests",
            "print a layout as Kubernetes objects, for kubectl apply",
        ),
        "hosts": ("actors.provision.hosts", "hosts", "write what creates a layout's machines as TPU VMs"),
    },
    "develop": {
        "stage1": ("wan_tpu.commands.staged", "encode", "run only the encoder, and write its embeddings"),
        "stage2": ("wan_tpu.commands.staged", "denoise", "run only the experts, and write the latents"),
        "stage3": ("wan_tpu.commands.staged", "decode", "run only the decoder, and write the video"),
        "calibrate": ("wan_tpu.commands.calibrate", "calibrate", "measure the curve by which MagCache skips steps"),
        "drive": ("actors.commands.drive", "drive", "what submit runs on the cluster: the batch's driver"),
    },
    "this program": {
        "completion": ("actors.cli", "completion", "print a script with which a shell completes commands and options"),
        "help": ("actors.cli", "help_", "show all commands, or one command's options"),
        "version": ("actors.cli", "version", "show the versions of this program and of what it uses"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
SHELLS = ("bash", "fish", "tcsh", "zsh")
_FILES = ("image", "last_image", "video", "loras", "executables", "destination")  # Arguments, other than paths.
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
    if not argv:
        print(format_help(), file=sys.stderr)
        return 2
    command = {"-h": "help", "--help": "help", "-V": "version", "--version": "version"}.get(argv[0], argv[0])
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS)
        raise InvalidInput(f"there is no {command!r}{hint}; choose from {', '.join(COMMANDS)}")
    with end_on_sigterm():
        try:
            with heavy_imports():
                run_command = find_command(command)
            return run_command(argv[1:])
        except ModuleNotFoundError as missing:
            if command not in EXTRAS or not missing.name:
                raise
            raise InvalidInput(
                f"wan-tpu {command} needs {missing.name}, which isn't installed: pip install '.[{EXTRAS[command]}]'"
            ) from missing


def find_command(name: str) -> Callable[[Sequence[str]], int | None]:
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

    from cluster.layout import Layout, list_shipped
    from wan_tpu.families import list_published, published_spec
    from wan_tpu.storage.addresses import absolute

    whole: Any = Parser(prog="wan-tpu", description="Video generation on TPUs.")
    commands = whole.add_actions(dest="command", parser_class=lambda prog, of: parser_of(find_command(of)))
    for name, (_, _, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary, of=name)
    specs = [published_spec(name) for name in list_published()]
    names = {
        "layout": list_shipped(),
        "emulate": [name for name in list_shipped() if Layout.load(name).devices_per_host is not None],
        "model": list(list_published()),
        "preset": sorted({name for spec in specs for name in spec.presets}),
        "solver": sorted({name for spec in specs for name in spec.solvers}),
    }
    # In bash these are completed by names and, where a file is one, too, by files; other shells complete files.
    functions = {name: f"_wan_tpu_{name}" for name in names}
    preamble = "\n".join(
        f"{functions[name]}() {{ compgen -W '{' '.join(words)}' -- $1; "
        f"{'' if name in ('preset', 'solver') else 'compgen -f -- $1; '}}}"
        for name, words in names.items()
    )
    for action in all_arguments(whole):
        name = {"model_id": "model", "source": "model"}.get(action.dest, action.dest)
        if name in names and action.choices is None:
            action.complete = {**shtab.FILE, "bash": functions[name], "preamble": {"bash": preamble}}  # type: ignore[attr-defined]
        elif action.type in (Path, absolute) or action.dest in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(whole, args.shell))


def help_(argv: Sequence[str]) -> int | None:
    """Show all commands, or one command's options: wan-tpu help generate."""
    parser = Parser(prog="wan-tpu help", description=help_.__doc__)
    parser.add_argument("about", nargs="?", choices=list(COMMANDS), metavar="COMMAND", help="its options are shown")
    about = parser.parse_args(argv).about
    if about is not None:
        return find_command(about)(["--help"])
    print(format_help())
    return None


def version(argv: Sequence[str]) -> None:
    """Show the versions of this program and of what it uses."""
    Parser(prog="wan-tpu version", description=version.__doc__).parse_args(argv)
    print(summarize_versions())


def format_help() -> str:
    """Return what wan-tpu does, and its commands by what they are for."""
    lines = [
        "usage: wan-tpu COMMAND ...",
        "",
        "Video generation on TPUs. It also runs on CPUs, but not on GPUs.",
        "",
        '  wan-tpu generate --model MODEL --prompt "a cat" -o cat.mp4',
        "  wan-tpu serve --model MODEL",
    ]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<12}{summary}" for name, (_, _, summary) in commands.items())]
    return "\n".join([*lines, "", "wan-tpu COMMAND --help shows its options."])


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
