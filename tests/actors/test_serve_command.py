"""`wan-tpu serve` before it joins a cluster: who may be let in, and the config for `serve deploy`."""

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from actors.api.deploying import argv
from actors.api.keys import add_key
from actors.api.memory import Sizes
from actors.cli import main
from actors.commands.serve import understood
from actors.commands.serve_arguments import check_access
from wan_tpu.errors import InvalidInput

LAYOUT = "emulated-demo"


def test_a_public_address_needs_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("WAN_TPU_API_KEYS", raising=False)
    file = tmp_path / "keys.json"
    for host in ("127.0.0.1", "localhost", "::1"):
        check_access(host, None, None)
    for host in ("0.0.0.0", "::", "10.0.0.5", "example.com"):
        with pytest.raises(InvalidInput, match="wan-tpu keys add"):
            check_access(host, None, None)
    with pytest.raises(InvalidInput, match="there is no key in"):
        check_access("127.0.0.1", file, None)
    add_key(file, "ann")
    check_access("0.0.0.0", file, None)
    check_access("0.0.0.0", None, file.read_text())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--host", "0.0.0.0"], "no API keys"),
        (["--port", "0"], "--port is 0"),
        (["--queue_limit", "0"], "--queue_limit is 0"),
        (["--largest", "720x1280"], "HEIGHT*WIDTH*FRAMES"),
    ],
)
def test_what_can_t_be_is_said_before_anything_starts(given, said, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WAN_TPU_API_KEYS", raising=False)
    common = ["--layout", LAYOUT, "--model_id", "some/model", "--address", "127.0.0.1:1", "--folder", str(tmp_path)]
    assert main(["serve", *common, *given]) == 2
    assert said in capsys.readouterr().err


def test_a_config_says_what_the_command_line_says(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WAN_TPU_API_KEYS", raising=False)
    file = tmp_path / "config.yaml"
    given = ["--layout", LAYOUT, "--model_id", "some/model", "--snapshots", "gs://bucket/snapshots"]
    given += ["--database", "postgresql://user@db/jobs", "--results", "gs://bucket/results", "--largest", "720*1280*81"]
    given += ["--largest", "480*832*121", "--queue_limit", "50", "--ingresses", "2", "--warm_up", "720*1280*81"]
    assert main(["serve", *given, "--write_config", str(file)]) == 0
    assert "serve deploy" in capsys.readouterr().out
    content = yaml.safe_load(file.read_text())
    ServeDeploySchema.model_validate(content)
    assert content["http_options"] == {"host": "127.0.0.1", "port": 8000}
    names = [app["name"] for app in content["applications"]]
    assert names == [
        "wan-tpu-encoder",
        "wan-tpu-high",
        "wan-tpu-low",
        "wan-tpu-decoder",
        "wan-tpu-worker",
        "wan-tpu-http",
    ]
    assert [app["route_prefix"] for app in content["applications"]] == [None] * 5 + ["/"]
    for app in content["applications"]:
        settings, about = understood(argv(app["args"]["arguments"]), "10.0.0.1:6379")
        assert settings.room == Sizes(((720, 1280, 81), (480, 832, 121))) and settings.queue_limit == 50
        assert settings.database == "postgresql://user@db/jobs" and settings.model == "model"
        assert settings.chips == {"encoder": 4, "denoise_high": 4, "denoise_low": 8, "decoder": 4}
        assert about.settings.checkpoint == "some/model" and len(about.settings.warm_up) == 1
        assert app["args"].get("pool") in (None, *(pool.name for pool in about.layout.pools))


def test_a_config_names_places_that_every_machine_reaches(tmp_path, capsys):
    given = ["--layout", LAYOUT, "--model_id", "some/model", "--write_config", str(tmp_path / "config.yaml")]
    assert main(["serve", *given]) == 2
    assert "--snapshots is missing" in capsys.readouterr().err
