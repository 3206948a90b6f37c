"""`wan-tpu generate` without a prompt: a session that keeps weights and programs for one video after another."""

import argparse
import contextlib
import copy
import importlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from wan_tpu.commands import arguments
from wan_tpu.commands.importing import heavy_imports
from wan_tpu.commands.parser import Parser
from wan_tpu.commands.previewing import read_options
from wan_tpu.errors import InvalidInput, WanTpuError
from wan_tpu.families import family_of_spec, open_spec
from wan_tpu.fields import type_of
from wan_tpu.lengths import describe_length
from wan_tpu.progress import say
from wan_tpu.request import FIELDS
from wan_tpu.storage.folder import state_folder
from wan_tpu.suggest import did_you_mean
from wan_tpu.switches import set_switches

if TYPE_CHECKING:
    from wan_tpu.pipeline import Pipeline
    from wan_tpu.plan import RequestPlan

HELP = """\
Type what the next video shows. A line that begins with ! changes a setting of all later videos:
  !seed N       seed of the initial noise
  !image PATH   first frame
  !size WxH     width and height in pixels
  !preset NAME  way to sample
  !again        make the last prompt once more, with the next seed
  !quit         end the session, as Ctrl-D does; Ctrl-C ends the video that is being made
Every option for the request in wan-tpu generate --help is such a setting, such as !steps 20 or !negative_prompt ugly.
Without a value, it is left to the model again."""
_OTHERS = ("again", "help", "quit")
_REPEATED = {"lora": "loras", "reference": "references"}  # The fields of options that may be repeated.
_OTHERWISE = {"prompt", "height", "width", *_REPEATED.values()}  # Fields that have no setting of their name.
_NAMES = {*FIELDS, "size", "seconds", *_REPEATED} - _OTHERWISE  # Of the settings.
_LENGTHS = ("seconds", "frames")
_ONE_VIDEO = ("extend", "profile", "overwrite")  # Options that concern a single video.
_MOST_LINES = 1000  # Of the history.


def run_session(args: argparse.Namespace) -> None:
    """Make a video for each prompt that is typed, or for each line of a standard input that isn't a terminal.

    Raises:
        InvalidInput: An option is wrong, or there is no prompt.
        WanTpuError: A line of something that isn't a terminal can't be carried out.
    """
    for name in _ONE_VIDEO:
        if getattr(args, name):
            raise InvalidInput(f"--{name} is for one video; give its --prompt, too")
    session = Session(args)
    if sys.stdin.isatty():
        _run_on_terminal(session)
        return
    for line in sys.stdin:
        if session.has_ended:
            break
        session.obey(line)
    if session.prompt is None and not session.has_ended:
        raise InvalidInput(arguments.NO_PROMPT)


def _run_on_terminal(session: "Session") -> None:
    threading.Thread(target=session.prepare, daemon=True).start()  # While the user types.
    history = _History()
    say(f"{session.describe()}; !help lists the commands")
    with _note_sigterm() as terminated:
        while not session.has_ended:
            line = None
            try:
                line = input("prompt> ")
                history.add(line)
                session.obey(line)
            except EOFError:
                print()
                return
            except WanTpuError as error:
                print(f"error: {error}", file=sys.stderr)
            except KeyboardInterrupt:
                if terminated:
                    raise
                print("" if line is None else "\ninterrupted", file=sys.stderr)


@contextlib.contextmanager
def _note_sigterm() -> Iterator[list[int]]:
    """Yield a list that isn't empty once SIGTERM has come, which interrupts the main thread as Ctrl-C does."""
    before, received = signal.getsignal(signal.SIGTERM), list[int]()
    if not callable(before):
        yield received
        return

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        before(number, frame)

    signal.signal(signal.SIGTERM, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


class Session:
    """Settings, and the pipeline that makes videos with them.

    Attributes:
        prompt: The last prompt; None before the first.
        has_ended: Whether the user has asked to end the session.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        """Check the options.

        Raises:
            InvalidInput: The model, or a setting, is wrong.
        """
        set_switches(args.kernels, args.collectives)
        self._spec = open_spec(args.model_id)
        self._parser = Parser(prog="wan-tpu generate", add_help=False)
        arguments.add_request_arguments(self._parser)
        self._args = self._check(args)
        self._choose_outputs()
        self._pipeline: Pipeline | None = None
        self.prompt: str | None = None
        self.has_ended = False

    def prepare(self) -> None:
        """Import what making videos needs: JAX, PyTorch and the model's code take seconds."""
        with heavy_imports():
            importlib.import_module("wan_tpu.commands.recorded")
            family = family_of_spec(self._spec)
            assert family is not None
            family.part(family.model)

    def obey(self, line: str) -> None:
        """Carry out a line: make a video, or change a setting.

        Raises:
            WanTpuError: It can't be carried out. Nothing has changed.
        """
        line = line.strip()
        if not line:
            return
        if not line.startswith("!"):
            self._make(line)
            return
        name, _, value = line[1:].partition(" ")
        name, value = name.strip().replace("-", "_"), value.strip()
        if name == "quit":
            self.has_ended = True
        elif name == "help":
            print(HELP)
        elif name == "again":
            if self.prompt is None:
                raise InvalidInput("there is no prompt to make again; type one")
            self._change("seed", str(self._plan(self._args).request.seed + 1))
            self._make(self.prompt)
        else:
            self._change(name, value)
            say(self.describe())

    def describe(self) -> str:
        """Return the settings of the next video in one line."""
        plan = self._plan(self._args)
        request, at_most = plan.request, "at most " if plan.has_open_length else ""
        parts = [f"{request.width}x{request.height}", f"{at_most}{request.frames} frames", f"{request.steps} steps"]
        if request.preset is not None:
            parts.append(f"preset {request.preset}")
        return f"{self._spec.name}: {', '.join(parts)}, seed {request.seed}"

    def _change(self, name: str, value: str) -> None:
        if name.removeprefix("no_") not in _NAMES:
            hint = did_you_mean(name, [*_NAMES, *_OTHERS])
            raise InvalidInput(f"there is no !{name}{hint}; !help lists the commands")
        kind = type_of(FIELDS[name]) if name in FIELDS else None
        changed = copy.copy(self._args)
        if name in _LENGTHS:
            changed.seconds = changed.frames = None  # The one replaces the other.
        if kind is bool or name.startswith("no_"):
            words = [f"--{name}"]
        elif kind == list[float] and value:
            words = [f"--{name}", *value.split()]
        elif value:
            words = [f"--{name}={_as_shell(value)}"]
        else:
            words = []
            attribute = _REPEATED.get(name, name)
            setattr(changed, attribute, self._parser.get_default(attribute))
        self._args = self._check(self._parser.parse_args(words, changed))

    def _check(self, args: argparse.Namespace) -> argparse.Namespace:
        """Return arguments that the model can work with, apart from images that are still missing."""
        self._plan(args)
        return args

    def _plan(self, args: argparse.Namespace) -> "RequestPlan":
        request = arguments.request_from(args, prompt=".")
        image = True if "t2v" not in self._spec.tasks else None
        last = True if self._spec.last_images == "required" else None
        return self._spec.plan(request, image=image, last=last)

    def _make(self, prompt: str) -> None:
        request = arguments.request_from(self._args, prompt=prompt)
        plan = self._spec.plan(request)
        plan.check_prompt()
        outputs = self._choose_outputs()
        self.prompt = prompt
        with heavy_imports():
            from wan_tpu.commands.recorded import Recorder, make_recorded
        if self._pipeline is None:
            self._pipeline = arguments.pipeline_from(self._args, keep_weights=True)
        self._pipeline.check_components(*self._pipeline.runtime.model.spec.list_components(plan.request))
        recorder, start = Recorder(self._pipeline.runtime, plan), time.perf_counter()
        for warning in describe_length(self._args.seconds, plan.request, self._spec):
            recorder.warn(warning)
        made = make_recorded(self._pipeline, plan, recorder, outputs, previews=read_options(self._args))
        print(f"{outputs[0]}: seed {plan.request.seed}, {time.perf_counter() - start:.1f} s", flush=True)
        recorder.save(outputs[2], made)

    def _choose_outputs(self) -> tuple[Path, Path, Path]:
        """Return where the next video, its sheet and its record go: the first number that none of them has.

        Raises:
            OutputError: Nothing can be written there.
        """
        args = self._args
        output = args.output if args.output.suffix else args.output.with_suffix(".mp4")
        for number in itertools.count(1):
            video = output.with_name(f"{output.stem}-{number}{output.suffix}")
            if not any(video.with_suffix(suffix).exists() for suffix in (".mp4", ".sheet.png", ".json")):
                inputs = (args.image, args.last_image, args.video, args.model_id)
                return arguments.check_outputs(video, overwrite=False, inputs=inputs)
        raise AssertionError


def _as_shell(value: str) -> str:
    """Return a value as a shell would pass it on: without quotation marks around it, and ~/ as the home folder."""
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if is_quoted else os.path.expanduser(value) if value.startswith("~/") else value


class _History:
    """The lines of this user's sessions, which the arrow keys bring back."""

    def __init__(self) -> None:
        self._file = state_folder() / "history"
        with contextlib.suppress(ImportError, OSError):  # There is no line editing, or no history yet.
            import readline

            for line in self._file.read_text(errors="replace").splitlines()[-_MOST_LINES:]:
                readline.add_history(line)

    def add(self, line: str) -> None:
        """Keep a line for later sessions; `input` has added it to this one's history."""
        if not line.strip():
            return
        with contextlib.suppress(OSError):  # A session without a history is better than none.
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
                file.write(f"{line}\n")
