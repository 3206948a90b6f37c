"""Layouts: what is accepted, and what the errors of the others say."""

import pytest
import yaml

from cluster.errors import LayoutError
from cluster.layout import Layout, Replicas, shipped
from cluster.slice_spec import SliceSpec

STAGES = ("encoder", "denoise_high", "denoise_low", "decoder")
TOGETHER = STAGES[1:3]
GOOD = {
    "pools": {
        "ends": {"stages": ["encoder", "decoder"], "slice": "v6e-1"},
        "experts": {
            "stages": ["denoise_high", "denoise_low"],
            "slice": "v6e-8",
            "replicas": {"min": 1, "max": 3},
            "mesh": {"dp": 2, "tp": 4},
            "batch": 2,
        },
    }
}


def parse(content):
    return Layout.parse(content if isinstance(content, str) else yaml.safe_dump(content), "some.yaml", STAGES, TOGETHER)


def changed(pool, **changes):
    content = {"pools": {name: dict(fields) for name, fields in GOOD["pools"].items()}}
    content["pools"][pool] |= changes
    return content


def test_a_layout_is_read():
    layout = parse(GOOD)
    ends, experts = layout.pools
    assert ends.slice == SliceSpec("v6e-1")
    assert ends.replicas == Replicas(1, 1)
    assert experts.mesh == (2, None, 4)
    assert (ends.batch, experts.batch) == (1, 2)
    assert layout.pool_of("denoise_low") is experts
    assert layout.devices(experts) == 8
    assert [(pool.name, replica) for pool, replica in layout.slices()] == [("ends", 0), ("experts", 0)]
    assert len(list(layout.slices(most=True))) == 4
    assert not layout.emulated


@pytest.mark.parametrize("name", shipped())
def test_shipped_layouts_are_valid(name):
    layout = Layout.load(name, STAGES)
    assert layout.emulated == name.startswith("emulated")
    if layout.emulated:
        slices = layout.emulated_slices()
        assert len({s.name for s in slices}) == len(slices) == len(layout.pools)


def test_all_the_layouts_that_were_promised_are_shipped():
    assert set(shipped()) == {
        *("one-machine", "four-pools", "a14b-balanced-v6e", "a14b-multihost-v6e-16"),
        *("emulated-demo", "emulated-small"),
    }
    demo = Layout.load("emulated-demo.yaml", STAGES)
    assert [pool.slice.hosts for pool in demo.pools] == [1, 1, 2, 1]
    assert [s.name for s in demo.emulated_slices()] == ["v6e-4-0", "v6e-4-1", "v6e-4-2", "v5p-16-0"]
    balanced = Layout.load("a14b-balanced-v6e", STAGES)
    assert [pool.replicas.minimum for pool in balanced.pools] == [1, 3, 5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("pools: [", "some.yaml is no YAML"),
        ("3", "some.yaml: the file is 3; write keys and values"),
        ({"pools": {}}, "there are no pools; add pools"),
        ({"pols": {}}, "the file has 'pols'; known here: emulate, pools"),
        ({"pools": {"a b": {}}}, "pool a b: a pool's name is made of"),
        ("pools:\n  a: {}\n  a: {}", "'a' is there twice"),
        (changed("ends", stage=["encoder"]), "pool ends: the pool has 'stage'; known here: batch, mesh, replicas, sli"),
        (changed("ends", stages="encoder"), "pool ends: stages is 'encoder'; write a list of names"),
        (changed("ends", stages=["encoder", "vae"]), "pool ends: there is no stage 'vae'; stages are encoder, "),
        (changed("ends", stages=["encoder"]), r"no pool hosts decoder; add a pool with stages: \[decoder\]"),
        (changed("ends", stages=["encoder", "denoise_low"]), "experts: stage denoise_low is there also in pool ends"),
        (changed("ends", stages=["encoder", "encoder"]), "pool ends: stage encoder is there twice"),
        (changed("experts", stages=["denoise_low", "denoise_high"]), r"write stages: \[denoise_high, denoise_low\]"),
        (changed("ends", slice="v6e-6"), "pool ends: slice: there is no v6e-6; nearest: v6e-8"),
        (changed("ends", slice=None), "pool ends: slice is None; write a kind, such as slice: v6e-8"),
        (changed("ends", replicas=0), "pool ends: replicas is 0; write a whole number from 1"),
        (changed("ends", replicas=1001), "pool ends: replicas is 1001; write a whole number from 1 to 1000"),
        (changed("experts", batch=65), "pool experts: batch is 65; write a whole number from 1 to 64"),
        (changed("ends", replicas=True), "pool ends: replicas is True; write a whole number"),
        (changed("ends", replicas={"min": 3, "max": 2}), "pool ends: replicas: min is 3, max 2; exchange them"),
        (changed("experts", mesh={"dp": 3}), "mesh dp 3 doesn't divide the slice: v6e-8 has 8 devices; leave mesh out"),
        (changed("experts", mesh={"dp": 1, "sp": 1, "tp": 4}), "uses 4 of the slice's devices: .* make the product 8"),
        (changed("experts", mesh={"pp": 2}), "pool experts: mesh has 'pp'; known here: dp, sp, tp"),
        (changed("experts", batch=0), "pool experts: batch is 0; write a whole number from 1"),
        (changed("experts", batch={"max": 2}), "pool experts: batch is {'max': 2}; write a whole number from 1"),
        (
            changed("ends", batch=2),
            r"pool ends: batch is 2, and encoder, decoder take one request at a time; leave batch out \(denoise_h",
        ),
        (GOOD | {"emulate": {"devices_per_host": 0}}, "emulate: devices_per_host is 0; write a whole number from 1"),
        (GOOD | {"emulate": {}}, r"doesn't divide the slice: v6e-8 has 1 device when it is emulated \(8 when not\)"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(content, message):
    with pytest.raises(LayoutError, match=message) as raised:
        parse(content)
    assert str(raised.value).startswith("some.yaml")


def test_memory_is_checked_with_the_caller_s_numbers():
    layout = parse(GOOD)
    layout.check_memory({"encoder": 20, "decoder": 12, "denoise_high": 30})
    with pytest.raises(LayoutError, match=r"pool ends: encoder \+ decoder need 33.0 GiB, v6e-1 has 32; take v6e-4, or"):
        layout.check_memory({"encoder": 21, "decoder": 12})


def test_files_and_shipped_names(tmp_path):
    with pytest.raises(LayoutError, match=r"no layout file nowhere; shipped ones, by name: a14b-balanced-v6e, "):
        Layout.load("nowhere", STAGES)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(GOOD))
    assert Layout.load(tmp_path / "mine.yaml", STAGES, TOGETHER).source.endswith("mine.yaml")
    with pytest.raises(LayoutError, match=r"mine.yaml: it is for real TPUs; add emulate: {devices_per_host: 1}"):
        Layout.load(tmp_path / "mine.yaml", STAGES, TOGETHER).emulated_slices()
