"""examples/alerts.yaml: the alerts ask for metrics that there are, fire when they should, and name what to do."""

import re
import shutil
import subprocess

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase
from ray.util.metrics import Counter as RayCounter
from ray.util.metrics import Metric as RayMetric

from actors.api.http.job_failures import MEANINGS
from actors.api.metrics import Meters, ServiceMetrics
from actors.jobs.tables import CheckIn
from actors.jobs.values import Counts
from actors.observe.meters import BatchMeters, ChipMeters, PipelineMeters
from tests.conftest import ROOT
from tests.test_docs import sections

GROUPS = yaml.safe_load((ROOT / "examples" / "alerts.yaml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
TESTS = sorted((ROOT / "tests").glob("alerts*.yaml"))


def list_exported() -> dict[str, set[str]]:
    """Return the names of the samples that the service and Ray's agents export, each with its labels."""
    exported: dict[str, set[str]] = {}
    for metric in vars(Meters()).values():
        if isinstance(metric, MetricWrapperBase):
            [family] = metric.describe()
            for suffix in {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}.get(family.type, [""]):
                exported[family.name + suffix] = {*metric._labelnames, "le", "process"}
    counts = Counts(by_status={"queued": 1}, failures={"lost": 1}, oldest_queued_s=1.0, files_pending_deletion=1)
    process = CheckIn(name="worker-1", kind="worker", metrics="")
    for family in ServiceMetrics([process], counts, 1).collect():
        exported[family.name] = {label for sample in family.samples for label in sample.labels}
    for meters in (PipelineMeters(), BatchMeters({}, {}), ChipMeters(())):
        held = vars(meters)
        for metric in (*held.values(), *held.get("_gauges", {}).values()):
            if isinstance(metric, RayMetric):
                suffix = "_total" if isinstance(metric, RayCounter) else ""
                exported[f"ray_{metric.info['name']}{suffix}"] = set(metric.info["tag_keys"])
    return exported


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alerts_ask_for_metrics_that_are_exported(rule):
    exported, expression = list_exported(), rule["expr"]
    names = re.findall(r"\b(?:ray_)?wan_\w+", expression)
    assert names and set(names) <= exported.keys()
    allowed = set.union(*(exported[name] for name in names))
    labels = re.findall(r"(\w+)=~?\"", expression)
    for listed in re.findall(r"(?:by|on) \(([^)]*)\)", expression):
        labels += re.findall(r"\w+", listed)
    assert set(labels) <= allowed
    for codes in re.findall(r'code=~"([^"]*)"', expression):
        assert set(codes.split("|")) <= MEANINGS.keys()


def test_alerts_name_a_section_that_says_what_to_do():
    for rule in RULES:
        page, _, section = rule["annotations"]["runbook"].partition("#")
        assert section in sections(ROOT / page)


def test_each_alert_is_tested_to_fire_and_to_stay_quiet():
    cases = [
        case for file in TESTS for test in yaml.safe_load(file.read_text())["tests"] for case in test["alert_rule_test"]
    ]
    firing = {case["alertname"] for case in cases if case.get("exp_alerts")}
    quiet = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert firing == quiet == {rule["alert"] for rule in RULES}


def test_alerts_fire_when_they_should():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool (Debian: in the package prometheus; .ci/run takes it from there)")
    done = subprocess.run([promtool, "test", "rules", *TESTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
