"""The parser of all commands. It imports none of them, so that `--help` answers at once."""

import argparse
import contextvars
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from wan_tpu.errors import InvalidInput
from wan_tpu.suggest import did_you_mean

_EIGHT_BITS = [f"{kind}{suffix}" for suffix in ("", "-attention", "-attention-both") for kind in ("int8", "float8")]
PRECISIONS = ("bfloat16", "float32", *_EIGHT_BITS)
_only_built = contextvars.ContextVar("only_built", default=False)  # True while `parser_of` builds a parser.
_WIDTH = 100  # Characters of a line of a command's description.
_MARGIN = 26  # Characters of a line of help that an option's own text doesn't have.
_LEAST_WIDTH = 20
_NUMBER = re.compile(r"-\.?[0-9]")


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


class OptionGroup(Protocol):
    """What options are added to: a `Parser`, or a group of its options."""

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """Add an argument or an option, as `ArgumentParser.add_argument` does."""


class _Group:
    """A group of a parser's options, which the parser knows of."""

    def __init__(self, parser: "Parser", group: Any) -> None:
        self._parser, self._group = parser, group

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        return self._parser.note(self._group.add_argument(*names, **_complete(settings)))

    def add_alternatives(self) -> "_Group":
        """Return a group of options that exclude each other."""
        return _Group(self._parser, self._group.add_mutually_exclusive_group())


class ActionParsers(Protocol):
    """The actions of a command such as `wan-tpu cluster`."""

    def add_parser(self, name: str, **settings: Any) -> "Parser":
        """Return the parser of an action's arguments."""


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments like any other bad input: in one line, with the option or value that was probably meant.

    Dashes and underscores in an option's name are interchangeable. Options can't be abbreviated: an option that is
    added later would make an abbreviation ambiguous.

    Attributes:
        arguments: The arguments and options that were added.
        parsers: The parsers of its actions, by their names.
    """

    def __init__(self, *, examples: str = "", **settings: Any) -> None:
        """Take the arguments of `ArgumentParser`; `examples` are lines that the help ends with."""
        paragraphs = inspect.cleandoc(settings.get("description") or "").split("\n\n")
        text = "\n\n".join(part if part.startswith(" ") else textwrap.fill(part, _WIDTH) for part in paragraphs)
        settings |= {"description": text, "formatter_class": argparse.RawTextHelpFormatter, "allow_abbrev": False}
        if examples:
            settings["epilog"] = f"examples:\n{textwrap.indent(textwrap.dedent(examples).strip(), '  ')}"
        self.arguments: list[argparse.Action] = []
        self.parsers: Mapping[str, Parser] = {}
        super().__init__(**settings)

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """Add an argument or an option; wrong values of it are reported with the nearest that is allowed."""
        return self.note(super().add_argument(*names, **_complete(settings)))

    def add_group(self, title: str, description: str | None = None) -> _Group:
        """Return a group of options, which stands under its title in the help."""
        return _Group(self, self.add_argument_group(title, description))

    def add_alternatives(self) -> _Group:
        """Return a group of options that exclude each other."""
        return _Group(self, self.add_mutually_exclusive_group())

    def add_actions(self, **settings: Any) -> ActionParsers:
        """Add an argument that says what to do, and let each of its values have a parser of its own."""
        actions = self.add_subparsers(**settings)
        self.parsers = actions.choices
        self.note(actions)
        return actions

    def note(self, argument: argparse.Action) -> argparse.Action:
        """Return an argument that was added to this parser, or to a group of it."""
        self.arguments.append(argument)
        return argument

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
        options = [option for argument in self.arguments for option in argument.option_strings]
        plain = {option.replace("-", "_"): option for option in options}
        result: list[str] = []
        rest = iter(words)
        for word in rest:
            name, equals, value = word.partition("=")
            if word == "--" or (self.parsers and not word.startswith("-")):
                if word != "--" and word not in self.parsers:
                    self.error(_explain_choice(word, self.parsers))
                # The remaining words contain no options, or belong to another parser.
                return [*result, word, *rest]
            if not name.startswith("-") or name == "-" or " " in name or _NUMBER.match(name):
                result.append(word)
                continue
            known = name if name in options else plain.get(name.replace("-", "_"))
            if known is None:
                if any(name in argument.option_strings for argument in all_arguments(self)):
                    self.error(f"{name} must come after the action: {self.prog} ACTION {name} ...")
                self.error(f"there is no {name}{did_you_mean(name, options)}")
            result.append(f"{known}{equals}{value}")
        return result


def _complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an argument with our readers of its value, and its help in lines.

    Lines break only between words: options, hub ids and paths have hyphens.
    """
    completed, kind = dict(settings), settings.get("type")
    if kind in (int, float):
        completed["type"] = kind = _read_whole_number if kind is int else _read_number
    if "choices" in settings:
        completed["type"] = _reader_of(settings["choices"], kind or str)
    if settings.get("help"):
        width = max(_LEAST_WIDTH, shutil.get_terminal_size().columns - _MARGIN)
        text = " ".join(settings["help"].split())
        completed["help"] = textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False)
    return completed


def _reader_of(choices: Collection[Any], read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function that reads one of the choices."""

    def read_choice(text: str) -> Any:
        value = read(text)
        if value not in choices:
            raise argparse.ArgumentTypeError(_explain_choice(value, choices))
        return value

    return read_choice


def _explain_choice(value: Any, choices: Iterable[Any]) -> str:
    names = [str(choice) for choice in choices]
    return f"there is no {str(value)!r}{did_you_mean(str(value), names)}; choose from {', '.join(names)}"


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


def all_arguments(parser: Parser) -> Iterator[argparse.Action]:
    """Yield the options and arguments of a parser, and of the parsers of its actions."""
    yield from parser.arguments
    for inner in dict.fromkeys(parser.parsers.values()):
        yield from all_arguments(inner)


def add_model(group: OptionGroup, **settings: Any) -> None:
    """Add --model, also under its older name --model_id; the parsed arguments have it as `model_id`."""
    group.add_argument("--model", "--model_id", dest="model_id", metavar="MODEL", **settings)


def add_mesh(group: OptionGroup) -> None:
    """Add --dp, --sp and --tp, the axes of a mesh."""
    for axis, subject in (("dp", "guidance branches"), ("sp", "tokens"), ("tp", "heads and weights")):
        group.add_argument(
            f"--{axis}", type=int, help=f"devices along the mesh axis of {subject}; default the model's choice"
        )


def add_precision(group: OptionGroup, default: str | None = "bfloat16", purpose: str = "") -> None:
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
        f"-attention its logits, too, with -attention-both both of its products; default {default or 'bfloat16'}",
    )


def add_switches(group: OptionGroup) -> None:
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
