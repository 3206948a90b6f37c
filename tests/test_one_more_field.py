"""Adding a field to a request is one line: where it can be given, checked, stored and shown follows from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.one_more_field import list_digests


@pytest.mark.thorough
def test_one_line_gives_every_way_in_the_field(tmp_path):
    (tmp_path / "with").mkdir()
    command = [sys.executable, Path(__file__).with_name("one_more_field.py"), tmp_path / "with"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    # What has become of the field, by the way that it came.
    values = json.loads(done.stdout.splitlines()[-1])
    refused = "sharpness is 3; allowed: 0 to 2, nearest 2"
    assert values["command line"] == {"value": 1.5, "help": True, "refused": refused}
    assert values["manifest"] == {"values": [0.5, 1.5], "alike": False}
    http = values["http"]
    assert http["body"]["description"] == "Of edges, in 100 % of `num_frames`."
    assert {"type": "number", "minimum": 0, "maximum": 2} in http["body"]["anyOf"]
    assert http["form"] and http["refused"][0] == "sharpness"
    assert (http["stored"], http["shown"], http["planned"], http["snapshots"]) == (1.5, [1.5, None], [1.5, None], 2)
    # What is stored of requests without it still belongs to them.
    (tmp_path / "without").mkdir()
    assert values["digests"] == list_digests(tmp_path / "without")
