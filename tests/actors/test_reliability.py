"""Time-outs and retries that an operator may want to change are in one class, which the command line reaches."""

import argparse
import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator

import pytest

from actors.commands.timeouts import add_reliability, list_names, read_reliability
from actors.reliability import ReliabilitySettings, build_environment
from cluster.gang.protocol import Timeouts
from tests.conftest import ROOT
from wan_tpu.errors import InvalidInput
from wan_tpu.storage.base import OUTAGE_VARIABLE, outage_s

DURATION_OR_COUNT = re.compile(r"(_S|(?<!TH)(ATTEMPTS|TRIES|READS|RETRIES|MOVES|HANDLES|LOSSES|FAILURES))$")
FOLDERS = ("actors", "cluster", "wan_tpu/storage")
# Constants that no operator needs to change, by the reason why.
NOT_FOR_OPERATORS = {
    "the first value of a setting, in the package that can't import the class": """
        wan_tpu/storage/base.py:OUTAGE_S
    """,
    "a pause between two attempts or looks, which decides how busy a process is and not what fails": """
        actors/api/estimates.py:_LOOK_EVERY_S actors/api/http/access.py:REFRESH_S actors/api/http/following.py:_LOOK_S
        actors/api/http/following.py:_WATCH_S actors/api/http/watching.py:_AGAIN_S
        actors/api/intake/acceptance.py:_AGAIN_S actors/api/outbound/webhook.py:_LOOK_S
        actors/api/worker/fragments.py:_AGAIN_S
        actors/api/worker/attempt.py:_FIRST_PAUSE_S actors/api/worker/attempt.py:_LONGEST_PAUSE_S
        actors/api/worker/job_worker.py:_AGAIN_S actors/api/worker/job_worker.py:_LOOK_S
        actors/api/worker/maintenance.py:_ORPHANS_S actors/api/worker/maintenance.py:_SWEEP_S
        actors/api/worker/maintenance.py:_WEBHOOKS_S actors/batch/run.py:RESULTS_S actors/commands/submit.py:POLL_S
        actors/commands/submit.py:LONGEST_PAUSE_S actors/jobs/retention.py:_RETRY_S
        actors/pipeline/pools.py:POLL_S actors/pipeline/attempts.py:FIRST_WAIT_S
        actors/pipeline/attempts.py:LONGEST_WAIT_S actors/slices/references.py:DRIVER_CHECK_S
        actors/slices/fragments.py:WAIT_S actors/slices/stage_runner.py:LOOK_S cluster/gang/devices.py:POLL_S
        cluster/gang/placement.py:POLL_S cluster/gang/placement.py:STATUS_PAUSE_S cluster/gang/slice.py:BUSY_PAUSE_S
        wan_tpu/storage/s3.py:_LONGEST_PAUSE_S wan_tpu/storage/s3.py:_PAUSE_S
    """,
    "what people see: how often it is drawn, how long it is remembered, over which time it is counted": """
        actors/api/estimates.py:_UNKNOWN_S actors/api/metrics.py:_HTTP_S actors/api/metrics.py:_JOB_S
        actors/api/metrics.py:_STAGE_S actors/api/metrics.py:_STEP_S actors/commands/profile.py:MAX_S
        actors/commands/status.py:WATCH_S actors/jobs/check_ins.py:FORGET_S actors/observe/console.py:NEWS_S
        actors/observe/console.py:SILENCE_S actors/observe/console.py:TERMINAL_S actors/observe/meters.py:ZERO_S
        actors/observe/meters.py:_EVERY_S actors/observe/status_actor.py:REFRESH_S
        actors/observe/status_actor.py:RENEW_S actors/observe/status_board.py:EXPIRY_S
        actors/observe/status_board.py:FAILED_EXPIRY_S actors/observe/status_board.py:UNNAMED_EXPIRY_S
        actors/observe/status_board.py:_EXPIRY_S
    """,
    "an answer that normally takes milliseconds: without it the work goes on in another way": """
        actors/api/intake/acceptance.py:_LOOK_S actors/api/worker/fragments.py:_LAST_S
        actors/observe/status_actor.py:ANSWER_S
        actors/observe/status_actor.py:CLOSE_S actors/pipeline/acquire.py:ANSWER_S actors/pipeline/claim.py:FREE_S
        actors/pipeline/client.py:_READY_S actors/pipeline/pools.py:NEWS_S actors/pipeline/pools.py:_HANDLE_S
        actors/slices/handover.py:PUBLISHED_S
        actors/slices/leader.py:DRAIN_ANSWER_S actors/slices/references.py:ADOPT_S actors/slices/router.py:ANSWER_S
        actors/slices/router.py:ARRIVAL_S actors/slices/snapshots.py:_FINISHED_S actors/jobs/database.py:LOCK_WAIT_S
        cluster/draining.py:ANSWER_S cluster/gang/host_actor.py:_CONNECT_S cluster/gang/machine_place.py:_METADATA_S
    """,
    "how long ago something must be for nobody to use it any more": """
        actors/slices/handover.py:FETCHED_S actors/slices/snapshots.py:PARTIAL_S actors/interrupts.py:REPEATED_S
        actors/jobs/store.py:_ATTACH_MARGIN_S actors/jobs/store.py:_RETRY_WINDOW_S
        actors/api/intake/retries.py:_REMEMBERED_S actors/jobs/deliveries.py:_CLAIM_S
    """,
    "what clients are told or held to: docs/serving.md, and --limit where an operator may change it": """
        actors/api/http/access.py:BURST_S actors/api/http/error_answers.py:FAILURES
        actors/api/http/error_answers.py:_AGAIN_S actors/api/http/following.py:_AGAIN_S
        actors/api/http/lingering.py:_IDLE_S actors/api/http/lingering.py:_LINGER_S
        actors/api/http/watching.py:_SILENCE_S
        actors/api/http/proxy_limits.py:_AGAIN_S actors/api/http/proxy_limits.py:_WINDOW_S
        actors/api/intake/acceptance.py:_REPEAT_S actors/api/intake/fair_semaphore.py:_HALF_LIFE_S
        actors/api/intake/fair_semaphore.py:_HEAVY_S actors/api/intake/receiving.py:_AGAIN_S
        actors/api/intake/receiving.py:_BURST_S actors/api/outbound/webhook.py:_PAUSES_S
        cluster/provision/exposure.py:REQUEST_S cluster/provision/exposure.py:_DRAIN_S
        cluster/provision/haproxy.py:_AGAIN_S cluster/provision/haproxy.py:_BUSY_S
        cluster/provision/haproxy.py:_CLIENT_S cluster/provision/haproxy.py:_HEADERS_S
        cluster/provision/haproxy.py:_WINDOW_S
    """,
    "a step of a command that a person watches, and runs again": """
        actors/api/deploy.py:_ANSWERS_S actors/commands/doctor.py:PART_S actors/commands/submit.py:ANSWER_S
        actors/commands/submit.py:GIVE_UP_S actors/commands/submit.py:SILENCE_S actors/doctor/executables.py:COMPILE_S
        actors/doctor/prediction.py:PREDICT_S actors/doctor/timing.py:TRIES actors/pipeline/acquire.py:DRAIN_S
        cluster/emulation/haproxy.py:DRAIN_S
    """,
    "a bound far above what the work takes, so that a defect ends: a setting of the same phase comes first": """
        actors/api/processes.py:_PARTING_S actors/api/worker/previews.py:_TIMEOUT_S actors/slices/leader.py:END_DELAY_S
        actors/slices/stage_host.py:COMPILE_S cluster/gang/host_actor.py:CHIPS_S wan_tpu/storage/gcs.py:_TIMEOUT_S
    """,
    "what another system takes by its own settings": """
        actors/commands/mounted_layout.py:_WAIT_S
    """,
    "no time-out at all: units": """
        cluster/costs/capacity.py:DAY_S cluster/costs/capacity.py:HOUR_S
    """,
}


def list_constants() -> Iterator[str]:
    """Yield "file:NAME" of every constant of a module whose name says that it is a duration or a count of attempts."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(file.read_text()).body:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                for target in targets:
                    for name in ast.walk(target) if target is not None else ():
                        if isinstance(name, ast.Name) and DURATION_OR_COUNT.search(name.id):
                            yield f"{file.relative_to(ROOT).as_posix()}:{name.id}"


def read(*options: str) -> ReliabilitySettings:
    parser = argparse.ArgumentParser()
    add_reliability(parser)
    return read_reliability(parser.parse_args(options))


def test_constants_outside_the_class_are_explained():
    explained = [name for names in NOT_FOR_OPERATORS.values() for name in names.split()]
    assert len(explained) == len(set(explained)), "a constant has one reason"
    assert sorted(list_constants()) == sorted(explained), "add it to ReliabilitySettings, or here with the reason"


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
    with pytest.raises(InvalidInput, match="WAN_TPU_STORAGE_OUTAGE_S is 'ages'; give seconds"):
        outage_s()
