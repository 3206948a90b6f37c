"""The same cases on a folder and on buckets, with real clients and real HTTP."""

import os
import pickle
import re
from pathlib import Path

import pytest

from tests.actors.s3_server import count_uploads
from wan_tpu.errors import InvalidInput
from wan_tpu.storage import s3
from wan_tpu.storage.addresses import absolute, split_location
from wan_tpu.storage.base import Missing, StorageError
from wan_tpu.storage.opening import open_storage


def test_written_content_is_read_back(storage):
    content = os.urandom(100_000)
    storage.write("clips/cat.mp4", content)
    storage.write("empty.json", b"")
    assert storage.read("clips/cat.mp4") == content
    assert storage.list() == {"clips/cat.mp4": 100_000, "empty.json": 0}
    assert storage.list("clips/") == {"clips/cat.mp4": 100_000}
    storage.write("clips/cat.mp4", b"other")
    assert storage.read("clips/cat.mp4") == b"other"
    storage.delete("clips/cat.mp4")
    storage.delete("clips/cat.mp4")
    assert storage.list() == {"empty.json": 0}


def test_error_of_a_missing_name_says_where_it_is_missing(storage):
    with pytest.raises(Missing, match=r"nothing\.mp4"):
        storage.read("nothing.mp4")


@pytest.mark.parametrize(
    "name", ["", "../out.mp4", "/etc/passwd", "a//b", "a/./b", "a\\b", ".hidden", "a\n", "x" * 201]
)
def test_names_stay_in_their_folder(storage, name):
    for act in (storage.read, storage.size, storage.delete, lambda name: storage.write(name, b"")):
        with pytest.raises(StorageError, match=re.escape(repr(name))):
            act(name)


def test_probe_leaves_nothing(storage):
    storage.probe()
    assert storage.list() == {}
    with storage.claim(["cat.mp4"]):
        assert storage.list() == {}


def test_hidden_folder_is_a_place_of_its_own(storage):
    """As a batch's snapshots are, below its output."""
    below = open_storage(storage.location() + "/.snapshots")
    below.write("cat.safetensors", b"state")
    assert below.list() == {"cat.safetensors": 5}
    assert below.read("cat.safetensors") == b"state"
    assert storage.list() == {}


def test_storage_survives_pickling(storage):
    storage.write("cat.mp4", b"video")
    there = pickle.loads(pickle.dumps(storage))
    assert there.location("cat.mp4") == storage.location("cat.mp4")
    assert there.read("cat.mp4") == b"video"


def test_location_names_folder_and_bucket(tmp_path, bucket):
    scheme = bucket.scheme
    assert open_storage(tmp_path).location("a/b.mp4") == f"{tmp_path}/a/b.mp4"
    assert open_storage(bucket.address + "/").location("a/b.mp4") == f"{bucket.address}/a/b.mp4"
    assert split_location(f"{scheme}bucket/a/b.png") == (f"{scheme}bucket/a", "b.png")
    assert split_location(f"{scheme}bucket/b.png") == (f"{scheme}bucket", "b.png")
    assert split_location("a/b.png") == ("a", "b.png")
    assert absolute(f"{scheme}bucket/a") == f"{scheme}bucket/a"
    with pytest.raises(InvalidInput, match=r"az://x.*gs://bucket/prefix.*s3://"):
        open_storage("az://x")
    with pytest.raises(InvalidInput, match="gs://"):
        open_storage(Path(f"{scheme}videos/run"))  # which is gs:/videos/run
    with pytest.raises(InvalidInput, match=f"{scheme}bucket/prefix"):
        open_storage(scheme)


@pytest.mark.parametrize("size", [1000, 12_000_000])
def test_content_written_in_pieces_is_there_whole_or_not_at_all(storage, size, monkeypatch):
    monkeypatch.setattr(s3, "PART_BYTES", 5 * 2**20)
    content = os.urandom(size)
    with pytest.raises(ZeroDivisionError), storage.writing("a.bin") as file:
        file.write(content)
        raise ZeroDivisionError
    assert not storage.has("a.bin") and storage.list() == {}
    with storage.writing("a.bin") as file:
        for start in range(0, size, 700_000):
            assert not storage.has("a.bin")
            file.write(content[start : start + 700_000])
    assert storage.has("a.bin") and storage.read("a.bin") == content
    if isinstance(storage, s3.S3Storage):
        assert count_uploads(storage) == 0


def test_part_of_content_is_read_without_the_rest(storage):
    storage.write("a.mp4", b"0123456789")
    assert storage.size("a.mp4") == 10
    assert [storage.read("a.mp4", *part) for part in ((0, 3), (7,), (3, 99), (4, 4))] == [
        b"012",
        b"789",
        b"3456789",
        b"",
    ]
    with pytest.raises(Missing):
        storage.size("b.mp4")


def test_open_file_is_read_in_pieces_to_its_end_though_it_is_deleted(storage):
    content = os.urandom(50_000)
    storage.write("a.mp4", content)
    file = storage.open("a.mp4", 10)
    first = file.read(1000)
    storage.delete("a.mp4")
    pieces = list(iter(lambda: file.read(20_000), b""))
    file.close()
    file.close()
    assert first == content[10:1010] and b"".join(pieces) == content[1010:]
    assert max(map(len, pieces)) <= 20_000
    with pytest.raises(Missing):
        storage.open("a.mp4")
