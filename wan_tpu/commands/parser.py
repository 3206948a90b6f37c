"""The parser of all commands. It imports none of them, so that `--help` answers at once."""

import argparse
import contextvars
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from wan_tpu.errors import InvalidInput
from wan_tpu.suggest import did_you_mean

PRECISIONS = ("bfloat16", "float32", "int8", "float8", "int8-attention", "float8-attention")
_only_built = contextvars.ContextVar("only_built", default=False)  # True while `parser_of` builds a parser.
_WIDTH = 100  # Characters of a line of help.
_NUMBER = re.compile(r"-\.?[0-9]")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Breaks lines only between words: options, hub ids and paths have hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)


def _read_whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is {text!r}; give a whole number") from None


def _read_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is {text!r}; give a number") from None


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments like any other bad input: in one line, with the option or value that was probably meant.

    Dashes and underscores in an option's name are interchangeable. Options can't be abbreviated: an option that is
    added later would make an abbreviation ambiguous.
    """

    def __init__(self, *, examples: str = "", **settings: Any) -> None:
        """Take the arguments of `ArgumentParser`; `examples` are lines that the help ends with."""
        paragraphs = inspect.cleandoc(settings.get("description") or "").split("\n\n")
        text = "\n\n".join(part if part.startswith(" ") else textwrap.fill(part, _WIDTH) for part in paragraphs)
        settings |= {"description": text, "formatter_class": _Formatter, "allow_abbrev": False}
        if examples:
            settings["epilog"] = f"examples:\n{textwrap.indent(textwrap.dedent(examples).strip(), '  ')}"
        super().__init__(**settings)
        self.register("type", int, _read_whole_number)
        self.register("type", float, _read_number)

    def error(self, message: str) -> NoReturn:
        """Raise `InvalidInput`."""
        raise InvalidInput(f"{message}; see {self.prog} --help")

    def non_defaults(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the arguments that differ from their defaults, by name."""
        return {name: value for name, value in vars(args).items() if value != self.get_default(name)}

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Parse as `ArgumentParser` does, but refuse an unknown option before a missing one."""
        if _only_built.get():
            raise _Built(self)
        return super().parse_known_args(self._spell(sys.argv[1:] if args is None else args), namespace)

    def _spell(self, words: Iterable[str]) -> list[str]:
        """Return the words with every option's name spelled as it was added."""
        options = self._option_string_actions
        plain = {option.replace("-", "_"): option for option in options}
        result: list[str] = []
        rest = iter(words)
        for word in rest:
            name, equals, value = word.partition("=")
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                # The remaining words contain no options, or belong to another parser.
                return [*result, word, *rest]
            if not name.startswith("-") or name == "-" or " " in name or _NUMBER.match(name):
                result.append(word)
                continue
            known = name if name in options else plain.get(name.replace("-", "_"))
            if known is None:
                if any(name in action.option_strings for action in all_actions(self)):
                    self.error(f"{name} must come after the action: {self.prog} ACTION {name} ...")
                self.error(f"there is no {name}{did_you_mean(name, options)}")
            result.append(f"{known}{equals}{value}")
        return result

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), choices)
            raise argparse.ArgumentError(action, f"there is no {value!r}{hint}; choose from {', '.join(choices)}")


class _Built(Exception):
    """Carries a parser out of the command that built it."""

    def __init__(self, parser: Parser) -> None:
        super().__init__()
        self.parser = parser


def parser_of(command: Callable[[Sequence[str]], object]) -> Parser:
    """Return the parser that a command reads its arguments with, without running the rest of the command."""
    token = _only_built.set(True)
    try:
        command([])
    except _Built as built:
        return built.parser
    finally:
        _only_built.reset(token)
    raise TypeError(f"{command} reads its arguments with another parser")


def all_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options and arguments of a parser, and of the parsers of its actions."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                yield from all_actions(inner)


def add_model(group: argparse._ActionsContainer, **settings: Any) -> None:
    """Add --model, also under its older name --model_id; the parsed arguments have it as `model_id`."""
    group.add_argument("--model", "--model_id", dest="model_id", metavar="MODEL", **settings)


def add_mesh(group: argparse._ActionsContainer) -> None:
    """Add --dp, --sp and --tp, the axes of a mesh."""
    for axis, subject in (("dp", "guidance branches"), ("sp", "tokens"), ("tp", "heads and weights")):
        group.add_argument(
            f"--{axis}", type=int, help=f"devices along the mesh axis of {subject}; default the model's choice"
        )


def add_precision(group: argparse._ActionsContainer, default: str | None = "bfloat16", purpose: str = "") -> None:
    """Add --precision, also under its older name --dtype."""
    group.add_argument(
        "--precision",
        "--dtype",
        dest="dtype",
        choices=PRECISIONS,
        default=default,
        metavar="PRECISION",
        help=f"{purpose or 'of weights and activations'}: {', '.join(PRECISIONS)}; int8 or float8, "
        "whichever the chip multiplies: the linear layers of transformers in 8 bits, all else in bfloat16; with "
        f"-attention its logits, too; default {default or 'bfloat16'}",
    )


def add_switches(group: argparse._ActionsContainer) -> None:
    """Add the switches of `wan_tpu.switches`."""
    group.add_argument(
        "--kernels",
        help="own, or plain operations in their place, to find a wrong one: reference, or reference:linear,attention; "
        "default own",
    )
    group.add_argument(
        "--collectives",
        choices=("overlapped", "synchronous"),
        help="synchronous: compute nothing while devices send, to find what is wrong on a chip; default overlapped",
    )


def flag_of(name: str) -> str:
    """Return the flag of a parsed argument."""
    return {"model_id": "--model", "dtype": "--precision"}.get(name, f"--{name}")


def as_words(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as words of a command line: True is a flag, a list an option that is repeated."""
    words = []
    for name, value in arguments.items():
        for item in value if isinstance(value, list) else [value]:
            words += [flag_of(name)] if item is True else [flag_of(name), str(item)]
    return words
