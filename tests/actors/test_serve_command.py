"""`wan-tpu serve` before it joins a cluster: who may be let in, and the config for `serve deploy`."""

import shlex
import threading
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from actors.api.deploy import prepare
from actors.api.settings import ServiceSettings
from actors.cli import main
from actors.commands import serve as commands
from actors.commands.mounted_layout import MountedLayout, wait_for_layout
from actors.commands.serve_config import read_service
from actors.jobs.keys import make_key, revoke_key
from actors.jobs.store import open_database
from actors.pipeline_spec import PipelineSettings
from actors.reliability import ReliabilitySettings
from wan_tpu.errors import InvalidInput, Unavailable

LAYOUT = "emulated-demo"


@pytest.mark.parametrize("more", [[], ["--name", "another", "--address", "127.0.0.1:1"]])
def test_detached_service_s_hint_takes_that_service_down(more, tmp_path, capsys, monkeypatch):
    taken_down = []
    monkeypatch.setattr(commands, "_bring_up", lambda args: "up")
    monkeypatch.setattr(commands, "_check_running", lambda args: None)
    monkeypatch.setattr(commands, "_take_down", taken_down.append)
    folder = tmp_path / "my state"
    assert main(["serve", "--detach", "--layout", LAYOUT, "--model", "m", "--folder", str(folder), *more]) == 0
    hint = capsys.readouterr().out.rpartition("wan-tpu ")[2]
    assert main(shlex.split(hint)) == 0
    [args] = taken_down
    assert (args.folder, args.address) == (folder, more[3] if more else None)
    assert args.name == (more[1] if more else PipelineSettings.name)


def test_a_public_address_needs_a_key(tmp_path):
    settings = ServiceSettings(database=str(tmp_path / "jobs.sqlite"), storage=str(tmp_path / "results"), model="m")
    for host in ("127.0.0.1", "localhost", "::1"):
        prepare(settings, host)
    for host in ("0.0.0.0", "::", "10.0.0.5", "example.com"):
        with pytest.raises(InvalidInput, match="wan-tpu keys add"):
            prepare(settings, host)
    database = open_database(settings.database)
    make_key(database, "ann")
    prepare(settings, "0.0.0.0")
    revoke_key(database, "ann")
    prepare(settings, "0.0.0.0")  # nobody is let in


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "0"], "--port is 0"),
        (["--queue_limit", "0"], "--queue_limit is 0"),
        (["--limit", "bodys=3"], "there is no limit 'bodys'"),
        (["--limit", "bodies=many"], "such as bodies=32"),
        (["--limit", "bodies=0"], "above 0"),
        (["--download_s", "0"], "--download_s is 0"),
        (["--keep_days", "inf"], "--keep_days is inf"),
        (["--largest", "1280x720"], "WIDTHxHEIGHTxFRAMES"),
        (["--warm_up", "10x720x81"], "--warm_up 10x720x81: width is 10; allowed: 16 to"),
    ],
)
def test_impossible_option_is_refused_before_anything_starts(options, message, tmp_path, capsys, checkpoint):
    model = str(checkpoint("wan2.2-i2v-a14b"))
    common = ["--layout", LAYOUT, "--model_id", model, "--address", "127.0.0.1:1", "--folder", str(tmp_path)]
    common += ["--snapshots", str(tmp_path)]
    assert main(["serve", *common, *options]) == 2
    assert message in capsys.readouterr().err


def test_the_head_of_a_real_cluster_is_not_this_machine(tmp_path, capsys, checkpoint, monkeypatch):
    """Its address is of the loopback there, and its disk is no place that hosts reach."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    options = ["--layout", LAYOUT, "--model_id", str(checkpoint("wan2.2-i2v-a14b")), "--folder", str(tmp_path)]
    assert main(["serve", *options]) == 2
    assert "--snapshots is missing" in capsys.readouterr().err
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # Ray's own commands accept this.
    assert main(["serve", *options]) == 2
    assert "RAY_ADDRESS is 'auto'; give host:port" in capsys.readouterr().err


def test_a_config_says_what_the_command_line_says(tmp_path, capsys, checkpoint):
    file = tmp_path / "config.yaml"
    model = str(checkpoint("wan2.2-i2v-a14b"))
    options = ["--layout", LAYOUT, "--model_id", model, "--snapshots", "gs://bucket/snapshots"]
    options += shlex.split(
        "--database postgresql://user@db/jobs --results gs://bucket/results --largest 1280x720x81 "
        "--largest 832x480x121 --queue_limit 50 --ingresses 2 --limit bodies=5 --alias sora-2 --timeout join=1200 "
        "--timeout heartbeat=60 --timeout chips=900 --timeout lease=60 --attempts stage=8 --attempts worker=4 "
        "--warm_up 1280x720x81"
    )
    assert main(["serve", *options, "--write_config", str(file)]) == 0
    output = capsys.readouterr().out
    assert "serve deploy" in output and "0.0.0.0:8000" in output and "won't call webhooks" in output
    content = yaml.safe_load(file.read_text())
    ServeDeploySchema.model_validate(content)
    assert content["http_options"] == {"host": "0.0.0.0", "port": 8000}
    names = [app["name"] for app in content["applications"]]
    assert names == [f"wan-tpu-{part}" for part in ("encoder", "high", "low", "decoder", "worker", "http")]
    assert [app["route_prefix"] for app in content["applications"]] == [None] * 5 + ["/"]
    for app in content["applications"]:
        assert app["import_path"].startswith("actors.commands.serve_config:")
        settings, spec = read_service(app["args"]["arguments"], "10.0.0.1:6379")
        assert settings.largest == ((720, 1280, 81), (480, 832, 121)) and settings.queue_limit == 50
        assert (settings.limits.bodies, settings.aliases, settings.dollars["encoder"]) == (5, ("sora-2",), 0)
        assert settings.database == "postgresql://user@db/jobs" and settings.model == Path(model).name
        assert settings.chips == {"encoder": 4, "denoise_high": 4, "denoise_low": 8, "decoder": 4}
        assert spec.settings.checkpoint == model and len(spec.settings.warm_up) == 1
        limits = ReliabilitySettings(
            join_s=1200, heartbeat_s=60, chips_s=900, lease_s=60, stage_attempts=8, worker_attempts=4
        )
        assert spec.settings.reliability == settings.reliability == limits
        assert app["args"].get("pool") in (None, *(pool.name for pool in spec.layout.pools))


def test_service_waits_for_the_layout_that_its_configuration_means(tmp_path):
    """Kubernetes brings a changed ConfigMap to a pod a minute after the configuration that goes with it."""
    file = tmp_path / "layout.yaml"
    new = MountedLayout(str(file), "pools: []")
    with pytest.raises(Unavailable, match=r"ConfigMap.*RayService"):
        wait_for_layout(new.path, new.sha256, wait_s=0)
    file.write_text("pools: old")
    with pytest.raises(Unavailable, match=new.sha256[:12]):
        wait_for_layout(new.path, new.sha256, wait_s=0)
    timer = threading.Timer(0.2, file.write_text, [new.text])
    timer.start()
    assert wait_for_layout(new.path, new.sha256) == new.text
    timer.join()


def test_a_layout_hosts_the_stages_of_the_model(checkpoint, capsys, tmp_path):
    options = ["--layout", LAYOUT, "--model_id", str(checkpoint("wan2.1-t2v-1.3b")), "--address", "127.0.0.1:1"]
    options += ["--snapshots", str(tmp_path)]
    assert main(["serve", *options]) == 2
    message = capsys.readouterr().err
    assert "denoise_high; it has encoder, denoise, decoder" in message
    assert "emulated-one-expert, " in message and "one-machine-one-expert" in message


def test_a_config_names_places_that_every_machine_reaches(tmp_path, capsys):
    options = ["--layout", LAYOUT, "--model_id", "some/model", "--write_config", str(tmp_path / "config.yaml")]
    assert main(["serve", *options]) == 2
    assert "--snapshots is missing" in capsys.readouterr().err
