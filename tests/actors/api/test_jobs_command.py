"""`wan-tpu jobs` against the real application."""

import json

from actors.cli import main
from actors.jobs.keys import OPERATE, KeyLimits, make_key
from tests.waiting import wait_for


def test_jobs_are_listed_shown_and_cancelled(client, service, capsys, monkeypatch):
    monkeypatch.setenv("WAN_TPU_URL", service)
    created = client.videos.create(prompt="a red ball\nrolls", size="48x32", seconds="1")

    def run(*argv):
        assert main(["jobs", *argv]) == 0
        return capsys.readouterr().out

    assert [video["id"] for video in json.loads(run("list", "--json"))] == [created.id]
    assert created.id in run("list", "--status", "queued") and created.id not in run("list", "--status", "failed")
    assert json.loads(run("show", created.id, "--json"))["prompt"] == "a red ball\nrolls"
    assert "cancelled" in run("cancel", created.id)
    assert client.videos.retrieve(created.id).status == "failed"
    assert "cancelled" in run("list")
    assert main(["jobs", "show", "video_unknown"]) == 2
    assert main(["jobs", "show", "../keys"]) == 2


def test_jobs_need_a_key_where_the_service_has_some(service, database, capsys):
    key = make_key(database, "operator", KeyLimits(scopes=(OPERATE,)))
    # A service learns of new keys within a second.
    assert wait_for(lambda: main(["jobs", "list", "--url", service, "--key", "wan_wrong"])) == 2
    assert main(["jobs", "list", "--url", f"{service}/v1/", "--key", key]) == 0
    assert main(["jobs", "list", "--url", "http://127.0.0.1:9"]) == 1
    capsys.readouterr()
