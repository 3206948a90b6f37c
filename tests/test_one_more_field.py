"""Adding a field to a request is one line: where it can be given, checked, stored and shown follows from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def reached(tmp_path_factory):
    """What has become of the field, by the way that it came."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("one_more_field.py")),
        str(tmp_path_factory.mktemp("field")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_command_line_has_an_option_for_it(reached):
    said = "sharpness is 3; allowed are 0 to 2, nearest 2"
    assert reached["command line"] == {"value": 1.5, "help": True, "refused": said}


def test_a_line_of_a_manifest_may_have_it(reached):
    assert reached["manifest"] == {"values": [0.5, 1.5], "alike": False}


def test_a_body_may_have_it_and_the_api_describes_it(reached):
    body = reached["http"]["body"]
    assert body["description"] == "Of edges, in 100 % of `num_frames`."
    assert {"type": "number", "minimum": 0, "maximum": 2} in body["anyOf"]
    assert reached["http"]["form"]
    assert reached["http"]["refused"][0] == "sharpness"


def test_a_job_keeps_it_and_an_answer_shows_it(reached):
    assert reached["http"]["stored"] == 1.5
    assert reached["http"]["shown"] == [1.5, None]


def test_the_planned_request_has_it_and_so_has_the_name_of_its_snapshots(reached):
    assert reached["http"]["planned"] == [1.5, None]
    assert reached["http"]["snapshots"] == 2
