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
            "emulated-one-expert minimax-h3-one-slice-v6e minimax-h3-v6e minimax-h3-v6e-16 minimax-h3-v7x "
            "one-expert-v6e one-machine-one-expert",
        ),
        (["encoder", "denoise", "refine", "decoder"], "ltx-2.3-v6e ltx-2.3-v7x"),
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


def test_shipped_layouts_are_as_their_comments_say():
    demo = Layout.load("emulated-demo.yaml")
    assert [pool.slice.hosts for pool in demo.pools] == [1, 1, 2, 1]
    assert [s.name for s in list_emulated_slices(demo)] == ["v6e-4-0", "v6e-4-1", "v6e-4-2", "v5p-16-0"]
    assert [pool.slice.hosts for pool in Layout.load("emulated-one-expert").pools] == [1, 2, 1]
    assert [pool.replicas.minimum for pool in Layout.load("a14b-balanced-v6e").pools] == [1, 3, 5]
    assert Layout.load("one-expert-v6e").find_pool("denoise").replicas == Replicas(1, 8)
    assert [(str(pool.slice), len(pool.stages)) for pool in Layout.load("ltx-2.3-v6e").pools] == [
        ("v6e-4", 1),
        ("v6e-8", 3),
    ]


A_COUNT = "write a whole number from 1 to 1000"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("pools: [", "it isn't valid YAML: "),
        ("3", "it is 3; write pools"),
        ("", "it is None; write pools"),
        ({"pools": {}}, "pools is {}; write pools: {NAME: "),
        ({"pools": ["a"]}, r"pools is \['a'\]; write pools: {NAME: "),
        ({"pools": {"a": 3}}, "pools: a is 3; write pools: {NAME: "),
        ({"emulate": {}}, "pools is missing; write pools: {NAME: "),
        (GOOD | {"pols": {}}, "it has the unknown key 'pols'; write pools, and emulate"),
        ({"pools": {"a b": {}}}, "pools: a b: name is 'a b'; a pool's name is made of"),
        ("pools:\n  a: {}\n  a: {}", "'a' appears twice"),
        (
            change_pool("encoder-decoder", stage=["encoder"]),
            "pools: encoder-decoder has the unknown key 'stage'; write pools: {NAME: {stages: ",
        ),
        (
            change_pool("encoder-decoder", stages="encoder"),
            "pools: encoder-decoder: stages is 'encoder'; write a list of names",
        ),
        (change_pool("encoder-decoder", stages=[]), r"pools: encoder-decoder: stages is \[\]; write a list of names"),
        (
            change_pool("encoder-decoder", stages=["encoder", "denoise_low"]),
            "pool experts: stage denoise_low is .* also in pool encoder-decoder",
        ),
        (
            change_pool("encoder-decoder", stages=["encoder", "encoder"]),
            "pool encoder-decoder: stage encoder is listed twice",
        ),
        (
            change_pool("encoder-decoder", slice="v6e-6"),
            "pools: encoder-decoder: slice: there is no v6e-6; nearest: v6e-8",
        ),
        (
            change_pool("encoder-decoder", slice=None),
            "pools: encoder-decoder: slice: None isn't a slice; write a generation and a size",
        ),
        (change_pool("encoder-decoder", replicas=0), f"pools: encoder-decoder: replicas: min is 0; {A_COUNT}"),
        (change_pool("encoder-decoder", replicas=1001), f"replicas: min is 1001; {A_COUNT}"),
        (change_pool("encoder-decoder", replicas=True), f"replicas: min is True; {A_COUNT}"),
        (change_pool("encoder-decoder", replicas="3"), f"replicas: min is '3'; {A_COUNT}"),
        (
            change_pool("encoder-decoder", replicas={"min": 3, "max": 2}),
            "pools: encoder-decoder: replicas: min is 3, but max is 2; swap them",
        ),
        (
            change_pool("encoder-decoder", replicas={"mi": 3}),
            "replicas has the unknown key 'mi'; write one number, or {min: 1, max",
        ),
        (
            change_pool("experts", mesh={"dp": 3}),
            "pool experts: mesh dp 3 needs 3 devices, but v6e-8 has 8; make the product 8",
        ),
        (
            change_pool("experts", mesh={"dp": 1, "sp": 1, "tp": 4}),
            "mesh dp 1 x sp 1 x tp 4 needs 4 devices, but v6e-8 has 8",
        ),
        (change_pool("experts", mesh={"pp": 2}), "pools: experts: mesh: pp is 2; write sizes of dp, sp and tp"),
        (change_pool("experts", batch=2), "pools: experts has the unknown key 'batch'"),
        (GOOD | {"emulate": {"devices_per_host": 0}}, f"emulate: devices_per_host is 0; {A_COUNT}"),
        (GOOD | {"emulate": {"devices": 1}}, "emulate: devices is 'devices'; write emulate: {devices_per_host: 1}"),
        (
            GOOD | {"emulate": {}},
            r"mesh dp 2 x tp 4 needs 8 devices, but v6e-8 has 1 when it is emulated \(8 when not\)",
        ),
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
        (["encoder", "vae"], "pool encoder-decoder: the model has no stage vae; it has encoder, denoise_high, "),
        (["encoder"], r"no pool hosts decoder; add a pool with stages: \[decoder\]"),
        (["decoder", "encoder"], r"pool encoder-decoder: stages are out of order; write stages: \[encoder, decoder\]"),
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
