"""A checkpoint in a bucket: the same video as from a folder, each file fetched once, and again when it has changed."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from google.cloud import storage

from actors.cli import main
from tests.children import run_module
from tests.conftest import ROOT
from wan_tpu import GenerationRequest, load_pipeline
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families import open_spec
from wan_tpu.storage.opening import open_storage

KIND = "wan2.1-t2v-1.3b"
BOTH = pytest.mark.parametrize("bucket", ["gs", pytest.param("s3", marks=pytest.mark.thorough)], indirect=True)
ASKED = GenerationRequest(prompt="a cat", height=32, width=32, frames=5, steps=2, seed=1)


@pytest.fixture
def checkpoint_address(checkpoint, bucket, tmp_path, monkeypatch):
    """A small checkpoint's address in the bucket."""
    monkeypatch.setenv("WAN_TPU_CACHE", str(tmp_path / "cache"))
    folder, written = checkpoint(KIND), bucket.storage
    for file in folder.rglob("*"):
        if file.is_file():
            written.write(f"small/{file.relative_to(folder)}", file.read_bytes())
    return f"{bucket.address}/small"


def downloads(bucket):
    """Return which requests asked for content, by the names that each service gives them."""
    if bucket.scheme == "gs://":
        return [line for line in bucket.emulator.seen if "alt=media" in line]
    return [line for line in bucket.emulator.seen if line.startswith("GET") and "list-type" not in line]


@BOTH
def test_the_video_is_that_of_the_folder_and_weights_are_read_where_they_are(
    checkpoint_address, pipeline, bucket, tmp_path
):
    bucket.emulator.seen.clear()
    assert open_spec(checkpoint_address).tasks == ("t2v",)
    assert not [line for line in downloads(bucket) if "safetensors" in line]
    video = load_pipeline(checkpoint_address, dtype="float32", mesh=(1, 1, 1)).generate(ASKED)
    assert np.array_equal(video.pixels, pipeline(KIND).generate(ASKED).pixels)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    bucket.emulator.seen.clear()
    Checkpoint(checkpoint_address).path("transformer")
    assert not downloads(bucket)  # all else is here


# After gs:// in one process, weights in s3:// are read range by range, which takes minutes from moto's server.
@pytest.mark.thorough
@pytest.mark.long
@BOTH
def test_a_checkpoint_is_converted_from_one_bucket_folder_to_another(checkpoint_address, bucket, pipeline, tmp_path):
    expected = pipeline(KIND, "bfloat16").generate(ASKED).pixels
    there, here = f"{bucket.address}/converted", tmp_path / "converted"
    for destination in (there, str(here)):
        assert main(["weights", "convert", checkpoint_address, destination]) == 0
    video = load_pipeline(there, mesh=(1, 1, 1)).generate(ASKED)
    assert np.array_equal(video.pixels, expected)
    objects = open_storage(there)
    files = {str(path.relative_to(here)): path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert files == {name: objects.read(name) for name in objects.list()}
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.long
def test_a_second_start_with_the_same_bucket_compiles_nothing(gcs_prefix, emulator, checkpoint):
    executables, objects = f"{gcs_prefix}/executables", []
    for _ in range(2):
        run_module("tests.actors.kept_programs_worker", checkpoint(KIND), executables)
        blobs = storage.Client().list_blobs("videos", prefix=f"{executables.removeprefix('gs://videos/')}/compiled/")
        objects.append({blob.name for blob in blobs if blob.name.endswith("-cache")})
    assert objects[0] and objects[0] == objects[1]


@BOTH
def test_changed_object_is_fetched_again(checkpoint_address, bucket):
    before = Checkpoint(checkpoint_address)
    assert before.index["_class_name"] == "WanPipeline"
    written = bucket.storage
    written.write("small/wan_tpu.json", b'{"defaults": {"steps": 3}}')
    assert dict(Checkpoint(checkpoint_address).sampling().defaults) == {"steps": 3}
    written.write("small/wan_tpu.json", b'{"defaults": {"steps": 4}}')
    bucket.emulator.seen.clear()
    assert dict(Checkpoint(checkpoint_address).sampling().defaults) == {"steps": 4}
    assert len(downloads(bucket)) == 1
    written.delete("small/wan_tpu.json")
    assert dict(Checkpoint(checkpoint_address).sampling().defaults) == {}


@BOTH
def test_two_processes_fetch_a_file_once(checkpoint_address, bucket):
    bucket.emulator.seen.clear()
    code = "import sys; from wan_tpu.checkpoint import Checkpoint; Checkpoint(sys.argv[1]).path('transformer')"
    both = [subprocess.Popen([sys.executable, "-c", code, checkpoint_address], cwd=ROOT) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    fetched = [line.partition("?")[0] for line in downloads(bucket)]
    assert len(fetched) == len(set(fetched)) > 5


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("gs://videos", "gs://bucket/folder"),
        ("gs://videos/nothing", r"gs://videos/nothing.*model_index\.json"),
        ("gs://nobody-s/model", "gs://nobody-s/model.*'nobody-s'"),
        ("s3://videos", "s3://bucket/folder"),
        ("s3://videos/nothing", r"s3://videos/nothing.*model_index\.json"),
        ("s3://nobody-s/model", "s3://nobody-s/model.*'nobody-s'"),
    ],
)
def test_missing_checkpoint_is_named_with_its_remedy(address, message, emulator, s3_emulator, tmp_path, monkeypatch):
    monkeypatch.setenv("WAN_TPU_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=message):
        open_spec(address)


@BOTH
def test_a_file_that_is_cut_off_is_not_kept(checkpoint_address, bucket, tmp_path):
    bucket.emulator.failures[:] = [(404, "Not Found", "before")] * 3
    with pytest.raises(CheckpointError, match="bucket"):
        Checkpoint(checkpoint_address)
    assert not list((tmp_path / "cache").rglob("model_index.json"))
    bucket.emulator.failures.clear()
    assert Checkpoint(checkpoint_address).index["_class_name"] == "WanPipeline"
    shutil.rmtree(Path(tmp_path / "cache"))
