"""Every line of gcloud, kubectl and terraform in the docs is one that these programs take, as far as their flags go."""

import re
import shlex

import pytest
import yaml

from tests.conftest import ROOT

KNOWN = yaml.safe_load((ROOT / "tests" / "cloud_commands.yaml").read_text())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_ENDS = {"&", "|", ">", ";", "&&"}


def commands_of(text):
    """Yield the words of each command of these programs in the shell blocks of a page, those in $(...) included."""
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        lines = re.sub(r"<<EOF\n.*?\nEOF\n", "\n", block.replace("\\\n", " "), flags=re.DOTALL).splitlines()
        for line in lines:
            inner = [text for text in re.findall(r"\$\(([^()]*)\)", line) if text.startswith((*KNOWN,))]
            for command in (*inner, re.sub(r"\$\([^()]*\)", "$VALUE", line)):
                words = shlex.split(command, comments=True)
                if words and words[0] in KNOWN:
                    end = next((i for i, word in enumerate(words) if word in _ENDS), len(words))
                    yield words[:end]


def problem_of(words):
    """Return what is wrong with a command, None where nothing is."""
    program, *rest = words
    name = next((name for name in sorted(KNOWN[program], key=len, reverse=True) if begins(rest, name.split())), None)
    if name is None:
        return f"{program} has no such command: {' '.join(rest[:4])}"
    rest, known = rest[len(name.split()) :], KNOWN[program][name]
    flags = {flag.removesuffix("!"): flag.endswith("!") for flag in known["flags"]}
    arguments = 0
    while rest:
        word = rest.pop(0)
        if word == "--" and known.get("rest"):
            break
        if not word.startswith("-"):
            arguments += 1
            continue
        flag, equals, _ = word.lstrip("-").partition("=")
        if flag not in flags:
            return f"{program} {name} has no flag {word}"
        if not flags[flag] and not equals and (not rest or rest.pop(0).startswith("-")):
            return f"{program} {name} {word} has no value"
    least, most = known["arguments"] if isinstance(known["arguments"], list) else [known["arguments"]] * 2
    return (
        None if least <= arguments <= most else f"{program} {name} takes {least} to {most} arguments, not {arguments}"
    )


def begins(words, start):
    return words[: len(start)] == start


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_docs_are_taken(page):
    problems = [problem for words in commands_of(page.read_text()) if (problem := problem_of(words))]
    assert not problems, "\n".join(problems)


def test_gke_is_set_up_by_many_commands():
    commands = [words[:3] for words in commands_of((ROOT / "docs" / "gke.md").read_text())]
    assert len(commands) > 40 and ["gcloud", "certificate-manager", "maps"] in commands
