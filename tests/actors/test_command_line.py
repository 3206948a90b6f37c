"""The command line itself: hints, help, completion, and the commands that documentation and messages show."""

import argparse
import contextlib
import functools
import itertools
import json
import re
import shlex
import signal
import subprocess
import sys

import pytest

from actors.cli import COMMANDS, SHELLS, find_command, main
from actors.commands.new_pipeline import build_spec
from actors.pipeline_spec import PipelineSettings
from cluster.emulation.cluster import EmulatedCluster, list_emulated_slices
from cluster.errors import LayoutError
from cluster.layout import Layout, list_shipped
from tests.conftest import ROOT
from wan_tpu.commands.parser import all_arguments, parser_of
from wan_tpu.families import FAMILIES, list_published, published_spec
from wan_tpu.families.ltx2.small import make_checkpoint
from wan_tpu.licences import show_licence
from wan_tpu.pipeline import load_pipeline

SMALL = ROOT / "examples" / "small-wan2.2-i2v"


HOSTS = ["hosts", "/proc/x", "--layout", "four-pools", "--image", "i", "--project", "p", "--zone", "z"]


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["genrate"], "there is no 'genrate' (did you mean generate?)"),
        (["generate", "--ckpt_dir", "wan"], "there is no --ckpt_dir (did you mean --model?)"),
        (["generate", "-p", "a cat"], "(did you mean --prompt?)"),
        (["jobs", "show", "x", "--url", "videos.example.com"], "http://127.0.0.1:8000"),
        (["jobs", "list", "--status", "done"], "choose from queued"),
        (["generate", "--model-id", "wan", "--num_inference_steps=4"], "(did you mean --steps?)"),
        (["generate", "--model", "wan", "--precision", "int8_attention"], "(did you mean int8-attention?)"),
        (["plan", "--model", "wan2.2-i2v-14b"], "(did you mean wan2.2-i2v-a14b?)"),
        (["plan", "--model-id", "wan2.1-t2v-14b", "--preset", "lightening", "--layout", "four-pools"], "lightning?"),
        (["plan", "--model", "wan2.1-t2v-14b", "--layout", "one_machine"], "(did you mean one-machine?)"),
        (["cluster", "up", "--emulate", "emulated_dmo"], "(did you mean emulated-demo?)"),
        (["cluster", "dwn"], "(did you mean down?)"),
        (["plan", "--model", "wan2.1-t2v-14b", "--steps", "1.5"], "argument --steps: it is '1.5'; give a whole number"),
        (["keys", "limit", "ann", "--per-minutes", "3"], "(did you mean --per_minute?)"),
        (
            ["keys", "--database", "jobs.sqlite", "list"],
            "--database must come after the action: wan-tpu keys ACTION --dat",
        ),
        (["serve", "--largest_size", "1280x720x81"], "(did you mean --largest?)"),
        (["generate", "--model", "m", "--prompt", "x", "-o", "a.gif"], "a.mp4"),
    ],
)
def test_misspelt_argument_is_answered_with_the_nearest_one(argv, hint, capsys):
    assert main(argv) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and hint in line


PLAN = ["plan", "--model", "wan2.1-t2v-1.3b", "--slice", "v6e-4"]


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["cluster", "up", "--emulate", "emulated-small", "--folder", "/proc/x"], "/proc/x can't be created (No such"),
        (["serve", "--write_config", "/proc/x/c.yaml"], "can't write /proc/x/c.yaml (No such"),
        (
            ["keys", "add", "ann", "--database", "/proc/x/jobs.sqlite"],
            "the folder of /proc/x/jobs.sqlite can't be created",
        ),
        ([*PLAN, "--compiled", "/proc/x"], "--compiled /proc/x can't be written to (No such"),
        ([*PLAN, "--plot", "/proc/x.png"], "can't write /proc/x.png (No such"),
        ([*PLAN, "--videos_a_day", "5", "--prices", "/proc/x.yaml"], "/proc/x.yaml can't be read (No such"),
        ([*PLAN, "--slice", "v6e-3"], "there is no v6e-3; nearest: v6e-4"),
        (["doctor", "--output", "/proc/x/doctor.json"], "--output /proc/x/doctor.json can't be written (No such"),
        (["pipeline", "down", "--drain_s", "-1"], "--drain_s is -1; give 0 or more"),
        (["profile", "low", "--output", "out", "--seconds", "nan"], "--seconds is nan; give 0.001 to 60"),
        (["keys", "usage", "--days", "0"], "--days is 0; give 1 to 36500"),
        (["keys", "add", "ann", "--scopes", "make,reed"], "there is no scope 'reed' (did you mean read?)"),
        (["drive", "--manifest", "m", "--output", "o", "--in_flight", "0"], "--in_flight is 0; give 1 to 10000"),
        (["submit", "--output", "o"], "--manifest is missing; a new job needs --manifest and --output"),
        ([*PLAN, "--program", "denoise stp"], "denoise step"),
        (["submit", "--stop", "a", "--attach", "b"], "--attach: not allowed with argument --stop"),
        (["submit", "--stop", "a", "--address", "ftp://head:8265"], "such as http://host:8265"),
        (["status", "--address", "head"], "--address is 'head'; give host:port"),
        (["status", "--address", "head:70000"], "--address is 'head:70000'; give host:port"),
        ([*HOSTS, "--account", "a@b"], "/proc/x (No"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_impossible_output_or_slice_is_refused_before_anything_is_computed(argv, error, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(argv) in (1, 2)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and error in line


BRINGS_UP = ["--layout", "emulated-small", "--model", str(SMALL)]


@pytest.mark.parametrize(
    "argv",
    [
        ["status"],
        ["pipeline", "up", *BRINGS_UP],
        ["pipeline", "down"],
        ["serve", *BRINGS_UP],
        ["serve", "--down"],
        ["submit", "--manifest", "in.jsonl", "--output", "out", *BRINGS_UP],
        ["drive", "--manifest", "in.jsonl", "--output", "out", *BRINGS_UP],
        ["profile", "all", "--output", "out"],
    ],
    ids=lambda argv: " ".join(argv[:2]),
)
def test_advice_to_start_a_cluster_works_as_it_is_typed(argv, tmp_path, capsys, monkeypatch):
    started = []
    monkeypatch.setattr(EmulatedCluster, "start", lambda *args, **options: started.append((args, options)) or Started())
    folder = tmp_path / "my state"
    assert main([*argv, "--folder", str(folder)]) == 2
    message = capsys.readouterr().err
    assert f"there is no emulated cluster in {folder}; " in message
    assert main(shlex.split(message.partition("wan-tpu ")[2])) == 0
    [((slices, _), options)] = started
    assert options["folder"] == folder
    expected = Layout.load("emulated-small" if "emulated-small" in argv else "emulated-demo")
    assert slices == list_emulated_slices(expected)
    assert not folder.exists()


def test_snapshots_that_can_t_be_kept_are_refused_before_a_pipeline_is_brought_up(tmp_path, capsys):
    state = {"temp": str(tmp_path / "ray"), "address": "127.0.0.1:1", "dashboard": None}
    (tmp_path / "cluster.json").write_text(json.dumps(state))
    options = ["--folder", str(tmp_path), "--address", "127.0.0.1:1", "--snapshots", "/proc/x"]
    assert main(["serve", *BRINGS_UP, *options]) in (1, 2)
    assert "can't write" in capsys.readouterr().err.splitlines()[-1]


class Started:
    address = dashboard = "127.0.0.1:1"


def test_without_a_command_all_are_listed(capsys):
    assert main([]) == 2
    message = capsys.readouterr().err
    assert all(name in message for name in COMMANDS)


def test_help_and_version_are_commands_too(capsys):
    for argv, text in ((["help"], "stage1"), (["help", "generate"], "--prompt"), (["version"], "jax")):
        with contextlib.suppress(SystemExit):
            assert main(argv) in (0, None)
        out = capsys.readouterr().out
        assert text in out
        assert max(map(len, out.splitlines())) <= 120


@functools.cache
def list_options():
    """The options of all commands."""
    parsers = [parser_of(find_command(name)) for name in COMMANDS]
    return {option for parser in parsers for action in all_arguments(parser) for option in action.option_strings}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_of_a_command_has_help(name):
    for action in all_arguments(parser_of(find_command(name))):
        option = "/".join(action.option_strings) or action.dest
        assert action.help and action.help != argparse.SUPPRESS, option
        help_text = action.help % (vars(action) | {"prog": name})
        assert not re.search(r"default:? default|default:? None", help_text), f"{option}: {help_text}"
        assert set(re.findall(r"(?<!\S)--[a-z_0-9]+", help_text)) <= list_options(), f"{option}: {help_text}"


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def commands_of(page):
    """The `wan-tpu` commands of a page's blocks, as lists of words."""
    for block in BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"(\w+=\S+ )*wan-tpu ", line):
                words = shlex.split(line, comments=True)
                words = words[words.index("wan-tpu") + 1 :]
                yield list(itertools.takewhile(lambda word: word not in ("|", "&&", ">", ";", "&"), words))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_documentation_can_be_parsed(page):
    for name, *words in commands_of(page):
        if name.startswith("-"):
            continue
        parser = parser_of(find_command(name))
        if "..." in words and not words[words.index("...") - 1].startswith("--"):  # some of its options
            known = {option for action in all_arguments(parser) for option in action.option_strings}
            assert {word for word in words if word.startswith("--")} <= known
        else:
            parser.parse_args([word.strip("[]") for word in words])


SHOWN = re.compile(r"wan-tpu ([a-z0-9]+)((?: (?:--)?[A-Za-z0-9_.:/*=-]+)+)")


def test_options_of_commands_that_messages_and_prose_name_are_there():
    files = [
        *PAGES,
        *(file for folder in ("actors", "wan_tpu", "cluster", "scripts") for file in ROOT.glob(f"{folder}/**/*.py")),
    ]
    for file in files:
        for name, rest in SHOWN.findall(file.read_text()):
            options = [word.partition("=")[0].rstrip(".,:") for word in rest.split() if word.startswith("--")]
            if options and name in COMMANDS:
                known = {
                    option
                    for action in all_arguments(parser_of(find_command(name)))
                    for option in action.option_strings
                }
                assert set(options) <= known, f"{file}: wan-tpu {name}{rest}"


def test_models_and_layouts_are_listed(capsys):
    assert main(["models", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)
    assert [model["model"] for model in models] == list(list_published())
    [wan] = [model for model in models if model["model"] == "wan2.2-i2v-a14b"]
    facts = {"makes": "image to video", "size": "1280x720", "frames": 81, "seconds": 5.1, "steps": 40}
    assert wan.items() >= facts.items() and "lightning" in wan["presets"]
    licensed = [name for family in FAMILIES.values() if family.licence for name in family.published]
    assert [model["model"] for model in models if model["licence"]] == licensed
    assert main(["layouts", "--json"]) == 0
    layouts = {layout["layout"]: layout for layout in json.loads(capsys.readouterr().out)}
    assert list(layouts) == list_shipped()
    assert layouts["four-pools"]["chips"] == "21 to 105" and layouts["emulated-demo"]["emulated"] == "yes"
    for argv, row in (
        (["models"], r"turbowan2.2-i2v-a14b +image +1280x720 +81 +5.1 +4"),
        (["models"], r"ltx-2.3-distilled +text or image +1536x1024 +121 +5.0 +11 +yes"),
        (["models"], r"minimax-h3 +text( or image)? +1344x768 +124 +5.2 +49 +yes\n(.*\n)+minimax-h3: turbo-4"),
        (["layouts", "--model", "ltx-2.3-distilled"], r"ltx-2.3-v6e +one expert, refine +12 +375 +no +1 x v6e-4: enc"),
        (["layouts", "--model", "wan2.2-ti2v-5b"], r"one-machine-one-expert +one expert +8 +250 +no +1 x v6e-8: enc"),
    ):
        assert main(argv) == 0
        assert re.search(row, capsys.readouterr().out)


def test_a_licence_is_said_once_and_where_models_are_listed(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WAN_TPU_CACHE", str(tmp_path))
    show_licence(published_spec("wan2.2-i2v-a14b"))
    assert capsys.readouterr().err == ""
    licence = "LTX-2 Community License of 2026-01-05"
    layout = Layout.load("emulated-demo")
    checkpoint = make_checkpoint(tmp_path / "ltx", "ltx-2.3")
    for expected in (True, False):
        with pytest.raises(LayoutError):  # This layout is for two experts.
            build_spec(layout, PipelineSettings(str(checkpoint), str(tmp_path)))
        assert (licence in capsys.readouterr().err) == expected
    monkeypatch.setenv("WAN_TPU_CACHE", str(tmp_path / "other"))
    for expected in (True, False):
        load_pipeline(checkpoint, "float32", (1, 1, 1))
        assert (licence in capsys.readouterr().err) == expected
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "Licence of LTX-2: LTX-2 Community License" in out
    assert max(map(len, out.splitlines())) <= 100


def test_bash_completes_commands_options_and_values(capsys, tmp_path):
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        (tmp_path / shell).write_text(capsys.readouterr().out)
    script = f'source {tmp_path / "bash"}; COMP_WORDS=(wan-tpu "$0" "$@"); COMP_CWORD=$(($# + 1)); '
    script += "_shtab_wan_tpu; echo ${COMPREPLY[@]}"
    for words, completed in (
        (["gener"], "generate"),
        (["generate", "--prec"], "--precision"),
        (["plan", "--model", "wan2.2-i"], "wan2.2-i2v-a14b"),
        (["cluster", "do"], "down"),
        (["cluster", "up", "--emulate", "emulated-d"], "emulated-demo"),
        (["generate", "--model", "ltx-2.3-d"], "ltx-2.3-distilled"),
        (["generate", "--preset", "lightn"], "lightning"),
        (["help", "gener"], "generate"),
        (["generate", "--image", str(ROOT / "examples" / "ca")], str(ROOT / "examples" / "cat.png")),
    ):
        done = subprocess.run(["bash", "--norc", "-c", script, *words], capture_output=True, text=True, check=True)
        assert completed in done.stdout.split(), (words, done)


def test_request_that_the_model_cannot_make_is_refused_without_importing_jax(tmp_path):
    code = "import sys; sys.modules['jax'] = sys.modules['torch'] = None; from actors.cli import main; sys.exit(main())"
    argv = ["generate", "--model", "examples/small-wan2.2-i2v", "--prompt", "x", "--output", str(tmp_path / "x.mp4")]
    done = subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "image" in done.stderr


def test_output_that_nobody_reads_to_its_end_is_no_error():
    command = [sys.executable, "-uc", "from actors.cli import main; import sys; sys.exit(main(['models']))"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 128 + signal.SIGPIPE
