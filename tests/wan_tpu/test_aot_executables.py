"""Compiled programs in a folder, on this machine's own backend: loaded, or compiled again with the reason said."""

import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.children import run_command
from tests.conftest import PHOTO, ROOT
from wan_tpu import GenerationRequest
from wan_tpu.aot import key
from wan_tpu.aot.executables import SUFFIX, Executables
from wan_tpu.aot.precompile import precompile
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import InvalidInput
from wan_tpu.families.model import open_model
from wan_tpu.runtime.mesh import make_mesh
from wan_tpu.runtime.program import Program, place

REQUEST = {"height": 32, "width": 48, "frames": 5}
LOGGER = "wan_tpu.aot.executables"


@pytest.fixture
def mesh():
    return make_mesh((1, 1, 1), heads=1)


def program(folder: Path, mesh, *, settings: str = "one", save: bool = False) -> Program:
    stored = Executables(folder, settings, save=save)
    return Program(lambda x: x @ x + 1, mesh, exact=True, name="square", executables=stored)


def test_a_stored_program_is_loaded_and_not_compiled(tmp_path, mesh, caplog):
    x = place(np.eye(3, dtype=np.float32), mesh)
    first = program(tmp_path, mesh, save=True)
    expected = first(x)
    again = program(tmp_path, mesh)
    caplog.clear()
    assert (np.asarray(again(x)) == np.asarray(expected)).all()
    assert (first.compile_s > 0, again.compile_s) == (True, 0)
    assert not caplog.records


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum"),
        (lambda data: data[: len(data) // 2], "checksum"),
        (lambda data: b"", "can't be loaded"),
        (lambda data: data.replace(b'"jax": "', b'"jax": "0.'), "jax is .*, was 0\\.0"),
        (lambda data: data.replace(b'"XLA_FLAGS": "', b'"XLA_FLAGS": "--other '), "XLA_FLAGS is .*, was --other"),
    ],
)
def test_what_cannot_be_used_is_compiled_again_and_the_log_says_why(tmp_path, mesh, caplog, damage, reason):
    x = place(np.eye(3, dtype=np.float32), mesh)
    program(tmp_path, mesh, save=True)(x)
    [file] = tmp_path.glob(f"*{SUFFIX}")
    file.write_bytes(damage(file.read_bytes()))
    caplog.clear()
    again = program(tmp_path, mesh)
    assert (np.asarray(again(x)) == np.eye(3) + 1).all()
    assert again.compile_s > 0
    [record] = [record for record in caplog.records if record.name.startswith("wan_tpu")]  # JAX may warn, too.
    assert record.levelno == logging.WARNING
    assert re.match(f"compiling square.*{reason}", record.getMessage())


def test_other_shapes_settings_or_precision_are_other_programs(tmp_path, mesh):
    program(tmp_path, mesh, save=True)(place(np.eye(3, dtype=np.float32), mesh))
    for settings, size in (("one", 4), ("two", 3)):
        other = program(tmp_path, mesh, settings=settings)
        other(place(np.eye(size, dtype=np.float32), mesh))
        assert other.compile_s > 0


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"precompile\.py"):
        Executables(tmp_path / "none", "one")


def test_shardings_that_are_the_same_are_written_the_same():
    described = AbstractMesh((1, 4), ("dp", "tp"))  # four devices nobody has here

    def describe(*axes):
        return key.describe_sharding(NamedSharding(described, P(*axes)))

    assert describe("tp") == describe("tp", None) == describe(("dp", "tp"))
    assert describe("dp") == describe(None, None) == describe()
    assert len({describe("tp"), describe(None, "tp"), describe()}) == 3


def test_source_that_makes_programs_is_in_the_key():
    """Its digest covers the models and not the code that stores programs."""
    files = {file.relative_to(ROOT / "wan_tpu").parts[0] for file in (ROOT / "wan_tpu").rglob("*.py")}
    assert {"aot", "families", "stages"} <= files
    assert key.describe_build()["source"] == key.source_digest()
    assert key.describe_build()["torchax"] == "0.0.13"


# Of a model's small checkpoint: a size, the programs of a video of this size, and those that differ by the images.
PROGRAMS = {
    "wan2.1-t2v-1.3b": (
        (32, 48, 5),
        ["text_encoder", "text keys", "denoise step", "decoder first", "decoder later"],
        [],
    ),
    "ltx-2.3-distilled": (
        (64, 128, 9),
        [
            *("text_encoder", "vae_encoder first", "vae_encoder first, larger", "text keys"),
            *("denoise step, smaller", "denoise step", "enlarge latents", "audio_decoder", "vocoder", "decoder first"),
        ],
        ["denoise step, smaller", "denoise step", "enlarge latents"],
    ),
    "minimax-h3": (
        (64, 96, 124),
        [
            *("text_encoder", "vae_encoder first", "text keys", "denoise step"),
            *("audio_decoder", "decoder first", "decoder later", "decoder later, last"),
        ],
        ["text_encoder", "text keys", "denoise step"],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "images"),
    [
        ("wan2.1-t2v-1.3b", ()),
        pytest.param("ltx-2.3-distilled", ("image",), marks=pytest.mark.thorough),
        pytest.param("ltx-2.3-distilled", (), marks=pytest.mark.thorough),
        pytest.param("minimax-h3", ("image", "last_image"), marks=pytest.mark.thorough),
        pytest.param("minimax-h3", ("last_image",), marks=pytest.mark.thorough),
    ],
)
def test_another_process_generates_without_compiling(kind, images, tmp_path, checkpoint):
    folder = checkpoint(kind)
    (height, width, frames), names, differing = PROGRAMS[kind]
    model = open_model(Checkpoint(folder))
    request = GenerationRequest(height=height, width=width, frames=frames).resolve(model.spec.defaults)
    mesh = make_mesh((1, 1, 1), heads=model.spec.heads)
    done = list(precompile(model, request, mesh, "float32", tmp_path / "programs"))
    numbers = ["no image", *["two images"] * (2 in model.spec.image_counts)]
    assert [program.name for program in done] == [*names, *(f"{name}, {n}" for n in numbers for name in differing)]
    assert all(program.compile_s > 0 for program in done)
    assert all(program.compile_s == 0 for program in precompile(model, request, mesh, "float32", tmp_path / "programs"))

    command = ["--model_id", str(folder), "--prompt", "A cat", "--size", f"{width}x{height}"]
    command += ["--frames", str(frames), "--dtype", "float32", "--dp", "1", "--sp", "1", "--tp", "1"]
    command += [part for name in images for part in (f"--{name}", str(PHOTO))]
    command += [] if kind.startswith("ltx") else ["--steps", "1"]
    loaded = tmp_path / "loaded.mp4"
    loading = [*command, "--executables", str(tmp_path / "programs"), "--output", str(loaded)]
    child = run_command("generate", *loading)
    assert child.returncode == 0, child.stderr
    assert "compiling" not in child.stderr
    stages = json.loads(loaded.with_suffix(".json").read_text())["stages"]
    assert [stage["compile_s"] for stage in stages] == [0] * len(stages)
