"""Time-outs and retries that an operator may want to change are in one class, which the command line reaches."""

import argparse
import dataclasses
import inspect

import pytest

from actors.commands.timeouts import add_reliability, list_names, read_reliability
from actors.reliability import ReliabilitySettings, build_environment
from cluster.gang.protocol import Timeouts
from tests.conftest import ROOT
from wan_tpu.errors import InvalidInput
from wan_tpu.storage.base import OUTAGE_VARIABLE, outage_s


def read(*options: str) -> ReliabilitySettings:
    parser = argparse.ArgumentParser()
    add_reliability(parser)
    return read_reliability(parser.parse_args(options))


def test_every_setting_is_reached_by_an_option():
    fields = {field.name: field for field in dataclasses.fields(ReliabilitySettings)}
    names = {f"{name}_s": f"--timeout={name}=7200.5" for name in list_names(ReliabilitySettings, "_s")}
    names |= {f"{name}_attempts": f"--attempts={name}=123" for name in list_names(ReliabilitySettings, "_attempts")}
    assert names.keys() == fields.keys()
    for name, option in names.items():
        beside = [] if name not in ("renewal_s", "check_in_s") else ["--timeout=lease=99999", "--timeout=absent=99999"]
        if name in ("lease_s", "absent_s"):
            beside = ["--timeout=renewal=0.1", "--timeout=check_in=0.1"]
        settings = read(option, *beside)
        assert getattr(settings, name) == (123 if name.endswith("_attempts") else 7200.5)


def test_every_setting_is_documented():
    """The class describes those that it adds, the table of docs/pipeline.md, or cluster.md for a slice's, all."""
    tables = "".join((ROOT / "docs" / page).read_text() for page in ("pipeline.md", "cluster.md"))
    own = [field.name for field in dataclasses.fields(ReliabilitySettings) if field.name not in vars(Timeouts())]
    described = inspect.getdoc(ReliabilitySettings) or ""  # Python 3.13 removes the indentation of docstrings itself.
    for name in own:
        assert f"    {name}: " in described, name
    for field in dataclasses.fields(ReliabilitySettings):
        name, default = field.name.removesuffix("_s").removesuffix("_attempts"), field.default
        unit = "" if field.name.endswith("_attempts") else " s"
        value = "none" if default is None else f"{default:g}{unit}"
        assert f"| `{name}` | {value} |" in tables, f"{name}, {value}"


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--timeout=leese=60", r"no time-out 'leese' \(did you mean lease\?\); choose from place, .*storage, lease"),
        ("--timeout=stage=5", "there is no time-out 'stage'"),
        ("--timeout=lease=soon", r"give a number of seconds, such as lease=1200"),
        ("--timeout=lease=0", "give a number of seconds above 0"),
        ("--timeout=lease=1.5", "lease must be at least twice renewal"),
        ("--attempts=stage=1.5", "give a whole number of at least 1, such as stage=8"),
        ("--attempts=stage=0", "give a whole number of at least 1"),
        ("--attempts=8", "there is no count of attempts '8'; choose from stage, "),
    ],
)
def test_wrong_option_is_refused_with_what_works(option, says):
    with pytest.raises(InvalidInput, match=says):
        read(option)


def test_storage_of_a_process_follows_the_setting(monkeypatch):
    monkeypatch.delenv(OUTAGE_VARIABLE, raising=False)
    assert build_environment(read()) == {} and outage_s() == ReliabilitySettings.storage_s
    for name, value in build_environment(read("--timeout=storage=600")).items():
        monkeypatch.setenv(name, value)
    assert outage_s() == 600
    monkeypatch.setenv(OUTAGE_VARIABLE, "ages")
    with pytest.raises(InvalidInput, match=r"WAN_TPU_STORAGE_OUTAGE_S.*'ages'"):
        outage_s()
