"""Layouts: what is accepted, and what the errors of the others say."""

import contextlib

import pytest
import yaml

from cluster.emulation.cluster import list_emulated_slices
from cluster.errors import LayoutError
from cluster.layout import Layout, Replicas, list_shipped
from cluster.slice_spec import SliceSpec
from tests.conftest import STAGES

ONE_EXPERT = ("encoder", "denoise", "decoder")
GOOD = {
    "pools": {
        "encoder-decoder": {"stages": ["encoder", "decoder"], "slice": "v6e-1"},
        "experts": {
            "stages": ["denoise_high", "denoise_low"],
            "slice": "v6e-8",
            "replicas": {"min": 1, "max": 3},
            "mesh": {"dp": 2, "tp": 4},
        },
    }
}


def parse(content):
    return Layout.parse(content if isinstance(content, str) else yaml.safe_dump(content), "some.yaml")


def change_pool(pool, **changes):
    content = {"pools": {name: dict(fields) for name, fields in GOOD["pools"].items()}}
    content["pools"][pool] |= changes
    return content


def test_a_layout_is_read():
    layout = parse(GOOD)
    encoder_decoder, experts = layout.pools
    assert encoder_decoder.slice == SliceSpec("v6e-1")
    assert encoder_decoder.replicas == Replicas(1, 1)
    assert experts.mesh == (2, None, 4)
    assert layout.find_pool("denoise_low") is experts
    assert layout.devices(experts) == 8
    assert [str(pool.replicas) for pool in layout.pools] == ["1", "1 to 3"]
    assert layout.devices_per_host is None


@pytest.mark.parametrize(
    ("stages", "names"),
    [
        (
            STAGES,
            "a14b-balanced-v6e a14b-four-steps-v6e a14b-multihost-v6e-16 emulated-demo emulated-small four-pools "
            "one-machine",
        ),
        (
            ONE_EXPERT,
            "emulated-one-expert fasth3-v6e fasth3-v7x minimax-h3-one-slice-v6e minimax-h3-v6e minimax-h3-v6e-16 "
            "minimax-h3-v7x one-expert-v6e one-machine-one-expert",
        ),
        (["encoder", "denoise", "refine", "decoder"], "ltx-2.3-v6e ltx-2.3-v7x"),
        (["encoder", "denoise", "denoise_ref", "decoder"], "minimax-h3-references-v6e minimax-h3-references-v7x"),
    ],
)
def test_shipped_layouts_are_those_of_a_kind_of_model(stages, names):
    layouts = {name: Layout.load(name) for name in list_shipped()}
    fitting = []
    for name, layout in layouts.items():
        assert (layout.devices_per_host is not None) == name.startswith("emulated")
        if layout.devices_per_host is not None:
            slices = list_emulated_slices(layout)
            assert len({s.name for s in slices}) == len(slices) == len(layout.pools)
        with contextlib.suppress(LayoutError):
            layout.check_stages(stages)
            fitting.append(name)
    assert fitting == names.split()


def test_an_optional_stage_may_be_left_out_and_has_its_place():
    stages = [*STAGES[:-1], "denoise_ref", STAGES[-1]]
    layout = parse(GOOD)
    layout.check_stages(stages, ["denoise_ref"])
    with pytest.raises(LayoutError, match="denoise_ref"):
        layout.check_stages(stages)
    hosting = Layout.load("minimax-h3-references-v6e")
    assert "denoise_ref" in hosting.stages and hosting.find_pool("denoise_ref").name == "references"
    hosting.check_stages(["encoder", "denoise", "denoise_ref", "decoder"], ["denoise_ref"])
    with pytest.raises(LayoutError):
        hosting.check_stages(["encoder", "denoise_ref", "denoise", "decoder"][::-1], ["denoise_ref"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("pools: [", "YAML"),
        ("3", r"\b3\b.*pools"),
        ("", "None.*pools"),
        ({"pools": {}}, "pools.*{}"),
        ({"pools": ["a"]}, r"pools.*\['a'\]"),
        ({"pools": {"a": 3}}, r"pools.*\ba\b.*\b3\b"),
        ({"emulate": {}}, "pools.*NAME"),
        (GOOD | {"pols": {}}, "'pols'.*pools.*emulate"),
        ({"pools": {"a b": {}}}, "pools.*name.*'a b'"),
        ("pools:\n  a: {}\n  a: {}", "'a'"),
        (change_pool("encoder-decoder", stage=["encoder"]), "pools.*encoder-decoder.*'stage'.*stages"),
        (change_pool("encoder-decoder", stages="encoder"), "pools.*encoder-decoder.*stages.*'encoder'"),
        (change_pool("encoder-decoder", stages=[]), r"pools.*encoder-decoder.*stages.*\[\]"),
        (change_pool("encoder-decoder", stages=["encoder", "denoise_low"]), "stage denoise_low.*encoder-decoder"),
        (change_pool("encoder-decoder", stages=["encoder", "encoder"]), "encoder-decoder.*stage encoder"),
        (change_pool("encoder-decoder", slice="v6e-6"), "pools.*encoder-decoder.*slice.*v6e-6.*v6e-8"),
        (change_pool("encoder-decoder", slice=None), "pools.*encoder-decoder.*slice.*None"),
        (change_pool("encoder-decoder", replicas=0), r"pools.*encoder-decoder.*replicas.*min.*\b0\b.*1000"),
        (change_pool("encoder-decoder", replicas=1001), "replicas.*min.*1001.*1000"),
        (change_pool("encoder-decoder", replicas=True), "replicas.*min.*True.*1000"),
        (change_pool("encoder-decoder", replicas="3"), "replicas.*min.*'3'.*1000"),
        (
            change_pool("encoder-decoder", replicas={"min": 3, "max": 2}),
            r"pools.*encoder-decoder.*replicas.*min.*\b3\b.*max.*\b2\b",
        ),
        (change_pool("encoder-decoder", replicas={"mi": 3}), "replicas.*'mi'.*{min: 1, max"),
        (change_pool("experts", mesh={"dp": 3}), r"mesh dp 3\b.*\b3\b.*v6e-8.*\b8\b.*\b8\b"),
        (change_pool("experts", mesh={"dp": 1, "sp": 1, "tp": 4}), r"mesh dp 1\b.*sp 1\b.*tp 4\b.*\b4\b.*v6e-8.*\b8\b"),
        (change_pool("experts", mesh={"pp": 2}), r"pools.*experts.*mesh.*pp.*\b2\b.*dp.*sp.*tp"),
        (change_pool("experts", batch=2), "pools.*experts.*'batch'"),
        (GOOD | {"emulate": {"devices_per_host": 0}}, r"emulate.*devices_per_host.*\b0\b.*1000"),
        (GOOD | {"emulate": {"devices": 1}}, "emulate.*'devices'.*devices_per_host"),
        (GOOD | {"emulate": {}}, r"mesh dp 2\b.*tp 4\b.*\b8\b.*v6e-8.*\b1\b.*\(8\b"),
    ],
)
def test_wrong_layout_is_refused_with_the_remedy(content, message):
    with pytest.raises(LayoutError, match=message) as raised:
        parse(content)
    assert str(raised.value).startswith("some.yaml: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (["encoder", "vae"], "encoder-decoder.*model.*stage vae.*encoder.*denoise_high"),
        (["encoder"], r"decoder.*stages.*\[decoder\]"),
        (["decoder", "encoder"], r"encoder-decoder.*stages.*stages.*\[encoder, decoder\]"),
    ],
)
def test_a_layout_hosts_the_stages_of_a_model(stages, message):
    parse(GOOD).check_stages(STAGES)
    with pytest.raises(LayoutError, match=message):
        parse(change_pool("encoder-decoder", stages=stages)).check_stages(STAGES)


def test_files_and_shipped_names(tmp_path):
    with pytest.raises(LayoutError, match=r"nowhere.*a14b-balanced-v6e"):
        Layout.load("nowhere")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(GOOD))
    assert Layout.load(tmp_path / "mine.yaml").source.endswith("mine.yaml")
    with pytest.raises(LayoutError, match=r"mine\.yaml.*devices_per_host"):
        list_emulated_slices(Layout.load(tmp_path / "mine.yaml"))
