"""Requests generated from the service's own description: no answer is a 5xx, and all match the description."""

import collections
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import openapi_spec_validator
import pytest

from actors.api.core.bodies import parse_json
from tests.actors.api.serving import open_client, serve, working
from tests.actors.jobs import postgres
from tests.waiting import wait_for

# Made up for each operation; 700 are more than 5,000 requests, with the description's limits ("coverage") tried, too.
EXAMPLES = os.environ.get("WAN_TPU_EXAMPLES", "4")
PHASES = "examples,coverage,fuzzing" if "WAN_TPU_EXAMPLES" in os.environ else "examples,fuzzing"
SEED = os.environ.get("WAN_TPU_SEED", "7")
# Not "positive_data_acceptance" and its kin: what fits the description may still not fit the model.
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_the_description_is_valid_and_its_examples_are(http):
    described = http.get("/openapi.json").json()
    openapi_spec_validator.validate(described)
    for path in described["paths"].values():
        for operation in path.values():
            assert {"400", "401", "429", "500", "503"} <= operation["responses"].keys()
    body = described["paths"]["/v1/videos"]["post"]["requestBody"]["content"]["application/json"]
    for example in body["examples"].values():
        assert parse_json(json.dumps(example["value"]))


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.thorough)])
def database(request, settings):
    """Return the address of a service's database. Either kind may reject texts and numbers that the other accepts."""
    if request.param == "sqlite":
        yield settings.database
        return
    if (programs := postgres.binaries()) is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    with postgres.server(programs) as server:
        yield server.new_database()


@pytest.mark.long
def test_whatever_is_asked_is_answered(database, settings, engine, tmp_path, record_property):
    program = shutil.which("schemathesis", path=os.pathsep.join([str(Path(sys.executable).parent), os.defpath]))
    if program is None:
        pytest.skip("schemathesis is not installed (pip install schemathesis)")
    limits = dataclasses.replace(settings.limits, image_bytes=200_000, video_bytes=200_000)
    impatient = dataclasses.replace(settings.reliability, answer_s=3.0)
    few = dataclasses.replace(settings, database=database, queue_limit=50, limits=limits, reliability=impatient)
    with serve(few) as address, working(few, engine), open_client(address) as http:
        command = [program, "run", f"{address}/openapi.json", "--checks", CHECKS, "--max-examples", EXAMPLES]
        command += ["--phases", PHASES, "--continue-on-failure", "--no-color", "--seed", SEED]
        command += ["--request-timeout", "30", "--warnings", "off", "--no-shrink"]
        # Once a key has been made up, nothing without one is admitted.
        command += ["--exclude-path-regex", "/v1/admin/keys"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3000)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        cases = int(re.search(r"([\d,]+) generated", done.stdout)[1].replace(",", ""))
        answers = count_answers(http)
        print(f"{cases} cases made up, {sum(answers.values())} requests answered: {dict(sorted(answers.items()))}")
        record_property("requests", sum(answers.values()))
        assert sum(answers.values()) >= cases >= 5 * int(EXAMPLES)  # Requests that were generated twice are left out.
        assert not [status for status in answers if status >= "500"]
        job = wait_for(lambda: http.post("/v1/videos", json={"prompt": "the worker is alive"}).json().get("id"))
        wait_for(lambda: http.get(f"/v1/videos/{job}").json()["status"] == "completed")


def count_answers(http):
    """Return how many requests the service itself has counted, by status."""
    counted = collections.Counter()
    for status, count in re.findall(r'wan_http_seconds_count{.*status="(\d+)"} (\S+)', http.get("/metrics").text):
        counted[status] += int(float(count))
    return counted
