"""Shardings change where numbers are computed, not what they are."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from tests.children import run_on_devices
from tests.conftest import PHOTO
from tests.wan_tpu.plans import MODEL, SLICE
from wan_tpu import GenerationRequest, MeshError
from wan_tpu.aot.programs import AbstractRuntime
from wan_tpu.aot.topology import DescribedSlice
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families import published_spec
from wan_tpu.families.model import open_model, published_model
from wan_tpu.pricing.planner import SlicePlanner
from wan_tpu.runtime.components import abstract_component
from wan_tpu.runtime.mesh import Rule, fill_shape, make_mesh, token_layout, weight_spec
from wan_tpu.runtime.runtime import Runtime
from wan_tpu.tiny import make_checkpoint


@pytest.mark.meshes
@pytest.mark.long
@pytest.mark.parametrize("count", [8, pytest.param(16, marks=pytest.mark.thorough)])
def test_several_devices_give_the_latents_of_one(count, tmp_path):
    experts = {"num_attention_heads": count // 2, "attention_head_dim": 256 // count}
    folder = make_checkpoint(tmp_path / "checkpoint", "wan2.2-i2v-a14b", transformer=experts)
    ratios = [[1, 1], [0.97, 0.97], [1, 1], [0.97, 1.5]]
    curve = {"ratios": ratios, "first_low": 2, "shift": 5, "boundary": 0.9}
    (folder / "wan_tpu.json").write_text(json.dumps({"magcache": [curve]}))
    out = tmp_path / "latents.npz"
    run_on_devices("tests.wan_tpu.mesh_worker", folder, PHOTO, out, count=count)
    latents = np.load(out)
    expected = latents["1x1x1"]
    assert len(latents.files) > 1
    for mesh in latents.files:
        # 1e-4: float32 sums in another order, over three steps and two experts
        assert np.abs(latents[mesh] - expected).max() <= 1e-4 * np.abs(expected).max(), mesh


# Billions of parameters of the transformer and of the text encoder, as published.
BILLIONS = {
    "wan2.1-t2v-1.3b": (1.4, 5.68),
    "wan2.1-t2v-14b": (14.3, 5.68),
    "wan2.1-i2v-14b-480p": (16.4, 5.68),
    "wan2.2-i2v-a14b": (14.3, 5.68),
    "wan2.2-ti2v-5b": (5.0, 5.68),
    "cogvideox-2b": (1.69, 4.76),
    "cogvideox1.5-5b-i2v": (5.57, 4.76),
    "hunyuanvideo1.5-720p-i2v": (8.33, 6.6),  # of Qwen's 7.07 without the last two layers and the table of outputs
    "ltx-2": (18.88, 11.77),
    "ltx-2.3-distilled": (18.99, 11.77),
    "ltx-2.5-distilled": (18.92, 11.91),
    "minimax-h3": (33.1, 25.2),
}
OFTEN = ("wan2.2-i2v-a14b", "cogvideox1.5-5b-i2v", "hunyuanvideo1.5-720p-i2v", "ltx-2.5-distilled", "minimax-h3")


@pytest.mark.parametrize(
    "kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.thorough) for kind in BILLIONS]
)
def test_every_weight_of_the_published_models_matches_one_rule(kind):
    """abstract_component refuses a weight that matches none or several."""
    model = published_model(kind)
    assert model.spec.name == kind
    mesh = make_mesh((1, 1, 1), heads=model.spec.heads)
    sizes = {}
    for name, component in model.components.items():
        params = abstract_component(component, "bfloat16", mesh).params
        sizes[name] = sum(p.size for p in jax.tree.leaves(params)) / 1e9
    billions = sizes[model.spec.denoise_stages[0]], sizes["text_encoder"]
    assert billions == pytest.approx(BILLIONS[kind], rel=0.03)


@pytest.mark.parametrize(
    "kind",
    [
        "wan2.1-i2v-14b-480p",
        *(
            pytest.param(kind, marks=pytest.mark.thorough)
            for kind in ("cogvideox1.5-5b-i2v", "hunyuanvideo1.5-480p-i2v", "ltx-2.3-distilled", "minimax-h3")
        ),
    ],
)
def test_programs_compiled_ahead_are_of_the_weights_that_are_loaded(kind, checkpoint):
    model, shapes = open_model(Checkpoint(checkpoint(kind))), []
    mesh = make_mesh((1, 1, 1), heads=model.spec.heads)
    for runtime in (AbstractRuntime(model, mesh, "bfloat16"), Runtime(model, mesh, "bfloat16", keep_weights=True)):
        params = {name: runtime.component(name).params for name in model.components}
        shapes.append(jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), params))
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("devices", "heads", "shape", "expected"),
    [
        (1, 40, (None, None, None), (1, 1, 1)),
        (8, 40, (None, None, None), (2, 1, 4)),
        (16, 12, (None, None, None), (2, 2, 4)),  # 12 heads don't divide by 8: the rest goes to the tokens
        (5, 40, (None, None, None), (1, 1, 5)),
        (8, 40, (1, None, None), (1, 1, 8)),
        (8, 40, (None, 2, None), (2, 2, 2)),
        (8, 40, (None, None, 8), (1, 1, 8)),
        (8, 40, (2, 1, 2), (2, 1, 2)),
    ],
)
def test_open_axes_take_the_default(devices, heads, shape, expected):
    assert fill_shape(shape, devices, heads) == expected


def test_a_mesh_by_axis_names():
    assert dict(make_mesh({"sp": 1}, heads=3).shape) == {"dp": 1, "sp": 1, "tp": 1}
    with pytest.raises(MeshError, match="dp, sp, tp"):
        make_mesh({"fsdp": 1}, heads=3)


def test_a_mesh_of_jax_is_taken_whatever_its_axis_types():
    explicit = jax.make_mesh((1, 1, 1), ("dp", "sp", "tp"))
    assert make_mesh(explicit, heads=2).axis_types == (jax.sharding.AxisType.Auto,) * 3
    with pytest.raises(MeshError, match="it needs"):
        make_mesh(jax.make_mesh((1,), ("tp",)), heads=2)


@pytest.mark.parametrize("shape", [5, 0, (), [], (True, 1, 1), (1, 1), "111", (1, -1, 1)])
def test_bad_mesh_shapes_are_refused(shape):
    with pytest.raises(MeshError, match=r"\(dp, sp, tp\)"):
        make_mesh(shape, heads=1)


@pytest.mark.parametrize(
    ("heads", "shape", "expected"),
    [(40, (1, 1, 16), (1, 2, 8)), (40, (1, 1, 6), (1, 3, 2)), (12, (2, 2, 8), (2, 4, 4))],
)
def test_axes_that_do_not_divide_the_heads_split_tokens(heads, shape, expected):
    mesh = make_mesh(shape, heads=heads, devices=jax.devices() * int(np.prod(shape)))
    assert tuple(mesh.shape.values()) == expected


def test_tokens_are_padded_to_the_devices():
    mesh = make_mesh((2, 4, 1), heads=1, devices=jax.devices() * 8)
    assert token_layout(mesh, 2, 9) == ("dp", ("sp", "tp"), 12, ("tp",))
    assert token_layout(mesh, 1, 9) == (None, ("dp", "sp", "tp"), 16, ("tp",))  # one branch: 'dp' splits tokens too
    whole = 2 * mesh.shape["tp"]
    assert token_layout(mesh, 1, 9, whole) == (None, ("sp", "dp", "tp"), 16, ("dp", "tp"))  # and heads, if they divide
    assert token_layout(mesh, 1, 9, whole + 1).head_axes == ("tp",)
    assert token_layout(mesh, 2, 9, whole).head_axes == ("tp",)


def test_a_weight_needs_exactly_one_rule():
    mesh = make_mesh((1, 1, 1), heads=1)
    rules = (Rule(r"a\..*", ()), Rule(r".*\.b", ()))
    for name, count in (("a.b", 2), ("c", 0)):
        with pytest.raises(MeshError, match=f"{name}.*{count}"):
            weight_spec(mesh, rules, name, (1,), stacked=False)


def test_machine_with_a_tpu_does_not_compute_on_its_cpu_unasked(monkeypatch):
    """Without libtpu JAX goes on on the CPU: a video would take days, and nobody would know why."""
    monkeypatch.setattr("wan_tpu.runtime.mesh.chip_files", lambda: ["/dev/vfio/0"])
    make_mesh((1, 1, 1), heads=1)  # Tests have asked for the CPU.
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(MeshError, match=r"/dev/vfio/0.*wan-tpu doctor"):
        make_mesh((1, 1, 1), heads=1)


class OnHost(DescribedSlice):
    """A slice whose devices need no compiler."""

    def devices(self):
        return jax.devices() * 4


def test_a_mesh_that_leaves_devices_of_the_slice_out_is_refused(tmp_path):
    described = OnHost(**{field.name: getattr(SLICE, field.name) for field in dataclasses.fields(SLICE)})
    request = GenerationRequest().resolve(published_spec(MODEL).defaults)
    planner = SlicePlanner(MODEL, request, described, dtype="bfloat16", cache=tmp_path, report=print)
    with pytest.raises(MeshError, match="uses 3 of the 4 devices of v6e-4"):
        planner.mesh((3, None, None))
