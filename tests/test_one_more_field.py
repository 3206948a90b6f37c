"""Adding a field to a request is one line: where it can be given, checked, stored and shown follows from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.one_more_field import list_digests


@pytest.fixture(scope="module")
def values_by_way(tmp_path_factory):
    """What has become of the field, by the way that it came."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("one_more_field.py")),
        str(tmp_path_factory.mktemp("field")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_command_line_has_an_option_for_it(values_by_way):
    message = "sharpness is 3; allowed: 0 to 2, nearest 2"
    assert values_by_way["command line"] == {"value": 1.5, "help": True, "refused": message}


def test_a_line_of_a_manifest_may_have_it(values_by_way):
    assert values_by_way["manifest"] == {"values": [0.5, 1.5], "alike": False}


def test_a_body_may_have_it_and_the_api_describes_it(values_by_way):
    body = values_by_way["http"]["body"]
    assert body["description"] == "Of edges, in 100 % of `num_frames`."
    assert {"type": "number", "minimum": 0, "maximum": 2} in body["anyOf"]
    assert values_by_way["http"]["form"]
    assert values_by_way["http"]["refused"][0] == "sharpness"


def test_a_job_keeps_it_and_an_answer_shows_it(values_by_way):
    assert values_by_way["http"]["stored"] == 1.5
    assert values_by_way["http"]["shown"] == [1.5, None]


def test_what_is_stored_of_requests_without_it_still_belongs_to_them(values_by_way, tmp_path):
    assert values_by_way["digests"] == list_digests(tmp_path)


def test_the_planned_request_has_it_and_so_has_the_name_of_its_snapshots(values_by_way):
    assert values_by_way["http"]["planned"] == [1.5, None]
    assert values_by_way["http"]["snapshots"] == 2
