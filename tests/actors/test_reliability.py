"""Time-outs and retries that an operator may want to change are in one class, which the command line reaches."""

import argparse
import dataclasses

import pytest

from actors.commands.timeouts import add_reliability, list_names, read_reliability
from actors.reliability import ReliabilitySettings, build_environment
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


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--timeout=leese=60", r"'leese'.*\blease\b.*place.*lease"),
        ("--timeout=stage=5", "'stage'"),
        ("--timeout=lease=soon", "lease=1200"),
        ("--timeout=lease=0", r" 0\b"),
        ("--timeout=lease=1.5", "lease.*renewal"),
        ("--attempts=stage=1.5", r"\b1\b.*stage=8"),
        ("--attempts=stage=0", r" 1\b"),
        ("--attempts=8", "'8'.*stage"),
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
