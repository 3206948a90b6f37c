"""Which pipeline a batch uses, what it says about arguments that change nothing, and what killed batches leave."""

import dataclasses
import json

import numpy as np
import pytest

from actors.batch.manifest import read_manifest
from actors.commands.arguments import add_cluster_arguments, add_drive_arguments
from actors.commands.drive import choose_in_flight, explain_ineffective
from actors.errors import PipelineNotFound
from actors.pipeline.acquire import check_usable
from actors.pipeline.leftovers import delete_leftovers
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from actors.slices.snapshots import Snapshots, name_of
from cluster.layout import Layout
from tests.actors.small_spec import SPEC
from tests.conftest import PHOTO
from wan_tpu.commands.parser import Parser
from wan_tpu.data import DenoiseState


def pipeline(layout="four-pools", **settings):
    settings = {"checkpoint": "/models/wan", "snapshots": "/snapshots"} | settings
    return PipelineSpec(Layout.load(layout), PipelineSettings(**settings), SPEC, lasting=True)


RUNS = pipeline()


def test_a_pipeline_of_the_same_model_precision_and_pools_is_used():
    check_usable(RUNS, None, None)
    check_usable(RUNS, None, "bfloat16")
    check_usable(RUNS, pipeline(snapshots="/elsewhere", dtype="int8"), None)


@pytest.mark.parametrize(
    ("settings", "precision", "message"),
    [
        (pipeline(checkpoint="/models/other"), None, "/models/wan.*/models/other.*--model"),
        (None, "int8", "bfloat16.*int8.*--precision"),
        (pipeline(dtype="float8"), "float8", "bfloat16.*float8"),
        (pipeline("a14b-balanced-v6e"), None, "pools.*four-pools.yaml.*a14b-balanced-v6e.yaml"),
    ],
)
def test_a_pipeline_that_makes_other_videos_is_refused(settings, precision, message):
    with pytest.raises(PipelineNotFound, match=message):
        check_usable(RUNS, settings, precision)


def arguments(*argv):
    parser = Parser()
    add_cluster_arguments(parser)
    add_drive_arguments(parser)
    args = parser.parse_args(["--manifest", "m.jsonl", "--output", "out", *argv])
    return args, parser.non_defaults(args)


def test_arguments_without_effect_on_a_pipeline_that_runs_are_told():
    args, explicit = arguments("--snapshot_every", "3", "--warm_up", "96x64x5", "--keep")
    assert explain_ineffective(args, explicit, RUNS) == [
        "--snapshot_every has no effect: pipeline wan-tpu is already running",
        "--warm_up has no effect: pipeline wan-tpu is already running",
        "--keep has no effect: pipeline wan-tpu is already running",
    ]


def test_arguments_that_are_as_the_pipeline_s_are_not_told():
    args, explicit = arguments("--snapshots", "/snapshots", "--in_flight", "16", "--precision", "bfloat16")
    assert explain_ineffective(args, explicit, RUNS) == []


@pytest.mark.parametrize(("layout", "expected"), [("one-machine", 2), ("four-pools", 30)])
def test_requests_in_flight_follow_the_layout(layout, expected):
    args, _ = arguments()
    spec = pipeline(layout)
    assert choose_in_flight(args.in_flight, spec) == expected
    assert choose_in_flight(3, spec) == 3


# ---- what killed batches leave


def request(folder, id_, **fields):
    path = folder / "requests.jsonl"
    path.write_text(json.dumps({"id": id_, "prompt": ""} | fields))
    return read_manifest(path, SPEC).entries[0]


def save(settings, entry, steps=(2, 3)):
    """Leave snapshots of a request, as a slice names them."""
    name = name_of(entry.id, entry.load().request, f"{settings.checkpoint} {settings.dtype}")
    for step in steps:
        state = DenoiseState(np.ones((1, 16, 1, 2, 2), np.float32), (), step)
        Snapshots(settings.snapshots).save(name, step, state)
    return name


def test_snapshots_of_requests_that_are_done_are_deleted(tmp_path):
    settings = dataclasses.replace(RUNS.settings, snapshots=str(tmp_path / "snapshots"))
    done = request(tmp_path, "clips/cat", image=str(PHOTO), seed=1)
    long = request(tmp_path, "clips/" + "cat" * 60)  # Its snapshots' names have a part of this id only.
    names = {entry: save(settings, entry) for entry in (done, long, request(tmp_path, "dog"))}
    another = save(settings, request(tmp_path, "clips/cat", seed=2))  # of somebody else, who uses the same id
    segment = save(settings, request(tmp_path, "clips/fox.0123.1"))  # A later segment of a line: its id is its own.
    ids = {entry.id: entry.load for entry in (done, long)} | {"clips/fox.0123.1": None}
    assert delete_leftovers(settings, lambda: ids) == 3
    assert Snapshots(settings.snapshots).find_newest(segment) is None
    left = {name: Snapshots(settings.snapshots).find_newest(name) for name in (*names.values(), another)}
    assert list(left.values()) == [None, None, 3, 3]


def test_nothing_is_planned_where_there_are_no_snapshots(tmp_path):
    settings = dataclasses.replace(RUNS.settings, snapshots=str(tmp_path / "none"))

    def fail_if_called():
        raise AssertionError("asked")

    assert delete_leftovers(settings, fail_if_called) == 0


def test_snapshots_that_can_not_be_looked_at_stop_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    settings = dataclasses.replace(RUNS.settings, snapshots=str(tmp_path / "file" / "snapshots"))
    assert delete_leftovers(settings, dict) == 0
    assert "snapshots" in caplog.text
