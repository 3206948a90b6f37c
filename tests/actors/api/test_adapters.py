"""Adapters and presets in the API: clients send names, and the worker's request has the files."""

import dataclasses

import pytest

from actors.api.catalogue import Catalogue
from actors.api.core.create_video import Adapter, CreateVideo
from actors.api.core.planning import choose_adapters
from tests.actors.api import serving
from tests.actors.api.serving import create, open_client, serve, wait_for_end
from tests.actors.small_spec import SmallSpec
from wan_tpu.errors import InvalidInput, InvalidRequest
from wan_tpu.families import published_spec
from wan_tpu.request import CheckpointOverrides, Preset
from wan_tpu.requested_adapter import RequestedAdapter
from wan_tpu.schedules.magcache import Curve, MagCache

A14B = published_spec("wan2.2-i2v-a14b")
FAST = Preset(
    "in two steps", "https://here", (("sigmas", (1.0, 0.5)), ("solver", "euler"), ("loras", (RequestedAdapter("x"),)))
)
PLAIN = Preset("without adapters", "https://here", (("guidance_scale", 1.0), ("guidance_scale_2", 1.0)))


@pytest.fixture
def spec():
    return dataclasses.replace(
        serving.SPEC, overrides=CheckpointOverrides(presets=(("fast", FAST), ("other", FAST), ("plain", PLAIN)))
    )


@pytest.fixture
def offering(settings):
    values = [
        "style=/adapters/style.safetensors:0.5",
        "fast=/a/high.safetensors@high",
        "fast=/a/low.safetensors@low",
    ]
    return dataclasses.replace(settings, catalogue=Catalogue.parse(values))


@pytest.fixture
def http(offering, spec, engine):
    engine.model = spec
    with serving.working(offering, engine), serve(offering, spec) as address:
        with open_client(address) as client:
            yield client


def test_a_job_has_the_adapters_files_and_its_client_their_names(http, engine):
    job = create(http, loras=[{"name": "style", "scale": 0.5}, {"name": "fast"}]).json()
    assert job["loras"] == [{"name": "style", "scale": 0.5}, {"name": "fast", "scale": 1.0}]
    assert wait_for_end(http, job["id"])["status"] == "completed"
    assert engine.requests[-1].loras == (
        RequestedAdapter("/adapters/style.safetensors", 0.25),
        RequestedAdapter("/a/high.safetensors", 1.0, "high"),
        RequestedAdapter("/a/low.safetensors", 1.0, "low"),
    )
    assert "/adapters" not in http.get("/v1/videos").text


def test_what_a_file_asks_for_besides_is_in_the_first_answer_once_and_under_its_name(offering, spec, engine):
    path = "/adapters/style.safetensors"
    asked = f"adapter {path} asks for reference_downscale_factor 2 in its header, which has no effect here"
    catalogue = dataclasses.replace(offering.catalogue, warnings={path: (asked,)})
    service, engine.model, engine.warnings = dataclasses.replace(offering, catalogue=catalogue), spec, (asked,)
    with serving.working(service, engine), serve(service, spec) as address, open_client(address) as http:
        assert create(http).json()["warnings"] == []
        first = create(http, loras=["style"]).json()
        remixed = http.post(f"/v1/videos/{first['id']}/remix", json={"prompt": "a dog"}).json()
        for video in (first, remixed):
            assert [warning.split()[1] for warning in video["warnings"]] == ["style"]
            assert wait_for_end(http, video["id"])["warnings"] == video["warnings"]


def test_a_preset_sets_what_is_left_open_and_brings_its_adapters(http, engine):
    job = create(http, preset="fast").json()
    assert (job["preset"], job["num_inference_steps"], job["solver"]) == ("fast", 2, "euler")
    assert (job["sigmas"], job["loras"]) == ([1.0, 0.5], [{"name": "fast", "scale": 1.0}])
    assert wait_for_end(http, job["id"])["status"] == "completed"
    assert [lora.path for lora in engine.requests[-1].loras] == ["/a/high.safetensors", "/a/low.safetensors"]
    assert engine.requests[-1].sigmas == (1.0, 0.5)
    other = create(http, preset="fast", num_inference_steps=5, loras=[{"name": "style"}], switch_step=1).json()
    assert (other["num_inference_steps"], other["sigmas"], other["switch_step"]) == (5, None, 1)
    assert wait_for_end(http, other["id"])["status"] == "completed"
    assert engine.requests[-1].loras == (RequestedAdapter("/adapters/style.safetensors", 0.5),)
    plain = create(http, preset="plain").json()
    assert (plain["guidance_scale"], plain["loras"]) == (1.0, [])
    remixed = http.post(f"/v1/videos/{job['id']}/remix", json={"prompt": "a dog"}).json()
    assert (remixed["preset"], remixed["loras"], remixed["sigmas"]) == ("fast", job["loras"], [1.0, 0.5])


def test_a_model_says_what_there_is(http):
    """A preset whose adapters the operator doesn't offer isn't listed."""
    model = http.get("/v1/models").json()["data"][0]
    assert model["loras"] == ["style", "fast"]
    assert [preset["name"] for preset in model["presets"]] == ["original", "diffusers", "fast", "plain"]
    assert model["presets"][2] == {
        "name": "fast",
        "about": "in two steps",
        "source": "https://here",
        "settings": {"sigmas": [1.0, 0.5], "solver": "euler"},
        "with_references": False,
    }


def test_adapter_that_isn_t_offered_is_refused(http):
    for fields, param, named in (
        ({"loras": [{"name": "/etc/passwd"}]}, "loras", "fast"),
        ({"loras": [{"name": "style", "scale": 99}]}, "loras.0.scale", "10"),
        ({"loras": [{"name": "style", "path": "x"}]}, "loras.0.path", ""),
        ({"loras": [5]}, "loras.0", ""),
        ({"loras": [{"name": "style"}] * 9}, "loras", "8"),
        ({"loras": [{"name": "fast"}] * 5}, "loras", "8"),
        ({"loras": [{"name": "style", "scale": 10}] * 1 + [{"name": "style", "scale": -11}]}, "loras.1.scale", "-10"),
        ({"preset": "other"}, "preset", "plain"),
        ({"sigmas": [0.5, 0.9]}, "sigmas", "0.9"),
        ({"sigmas": [0.5], "num_inference_steps": 3}, "sigmas", ""),
        ({"switch_step": 9}, "switch_step", "4"),
    ):
        answer = create(http, **fields)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param and named in error["message"], error


def test_a_cache_is_an_option_and_says_which_steps_it_skips(settings, engine):
    curve = Curve(((1, 1), (0.99, 0.99), (0.99, 0.99), (0.99, 0.99)), None, 5.0, None, MagCache(0.1, 1, 0.0))
    checkpoint = published_spec("wan2.1-t2v-1.3b").config
    spec = engine.model = dataclasses.replace(SmallSpec(checkpoint), overrides=CheckpointOverrides(curves=(curve,)))
    with serving.working(settings, engine), serve(settings, spec) as address, open_client(address) as http:
        assert http.get("/v1/models").json()["data"][0]["cache"] == "magcache:0.1,1,0"
        job = create(http, cache="magcache").json()
        assert (job["cache"], job["skipped_steps"]) == ("magcache", [2, 4])
        assert wait_for_end(http, job["id"])["status"] == "completed"
        assert engine.requests[-1].cache == "magcache"
        assert create(http).json()["skipped_steps"] == []
        assert create(http, cache="magcache", shift=3).json()["error"]["param"] == "cache"


def test_an_adapter_that_is_taken_from_the_catalogue_fails_its_jobs_by_name(offering, spec, engine):
    with serve(offering, spec) as address, open_client(address) as http:
        job = create(http, loras=[{"name": "style"}]).json()["id"]
        without = dataclasses.replace(offering, catalogue=Catalogue())
        with serving.working(without, engine):
            ended = wait_for_end(http, job)
        assert ended["error"]["code"] == "invalid" and "style" in ended["error"]["message"]


def test_a_preset_that_needs_its_adapter_is_refused_without_it():
    spec, catalogue = published_spec("minimax-h3"), Catalogue.parse(["style=s.safetensors", "fasth3-vsa=f.safetensors"])
    fields = {"prompt": "a cat", "preset": "fasth3-vsa"}
    for names in (None, ["style", "fasth3-vsa"]):
        loras = None if names is None else [Adapter(name=name) for name in names]
        chosen = choose_adapters(CreateVideo(**fields, loras=loras), spec, catalogue)
        assert [adapter["name"] for adapter in chosen] == (names or ["fasth3-vsa"])
    with pytest.raises(InvalidRequest) as refused:
        choose_adapters(CreateVideo(**fields, loras=[Adapter(name="style")]), spec, catalogue)
    assert refused.value.field == "loras"


def test_a_catalogue_is_read_from_what_an_operator_gives():
    catalogue = Catalogue.parse(["a=x.safetensors@low", "lightning"]).complete_for(A14B)
    assert catalogue.adapters["a"] == (RequestedAdapter("x.safetensors", expert="low"),)
    assert [lora.expert for lora in catalogue.adapters["lightning"]] == ["high", "low"]
    assert list(catalogue.list_presets(A14B)) == ["original", "diffusers", "lightning"]
    assert list(Catalogue().list_presets(A14B)) == ["original", "diffusers"]  # It has no adapters.
    for arguments, message in (
        (["=x"], "=x"),
        (["a=x:200"], r"\b10\b"),
        (["style"], "lightning"),
    ):
        with pytest.raises(InvalidInput, match=message):
            Catalogue.parse(arguments).complete_for(A14B)
    with pytest.raises(InvalidInput, match="@high"):
        Catalogue.parse(["a=x@high"]).complete_for(published_spec("wan2.1-t2v-14b"))


def test_presets_of_the_checkpoint_are_offered_and_are_no_files_of_the_operator(spec):
    catalogue = Catalogue.parse(["style=x.safetensors"]).complete_for(spec)
    assert list(catalogue.list_presets(spec)) == ["original", "diffusers", "fast", "other", "plain"]
    assert catalogue.files == Catalogue.parse(["style=x.safetensors"]).files
    named = Catalogue.parse(["fast=y.safetensors"]).complete_for(spec)
    assert [file.path for file in named.files] == ["y.safetensors"] == [file.path for file in named.adapters["fast"]]
