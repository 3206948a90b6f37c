"""Snapshots are insurance: what happens to their storage costs no request, and deletes none that may be whole."""

import asyncio
import dataclasses
import os
import socket

import numpy as np
import pytest

from actors.errors import StageInterrupted
from actors.slices.async_slice import AsyncSlice
from actors.slices.messages import SliceRequest
from actors.slices.payloads import pack
from actors.slices.snapshots import Snapshots, Snapshotter, delete_snapshots, name_of
from tests.actors.small_spec import SOUND_SPEC, SPEC
from wan_tpu.data import DenoiseState
from wan_tpu.families import published_spec
from wan_tpu.media.video_content import VideoContent
from wan_tpu.request import GenerationRequest
from wan_tpu.storage import base
from wan_tpu.storage.base import StorageError

NAME = "video.0123456789abcdef"
FILE = f"{NAME}.0005.safetensors"
STATE = DenoiseState(np.ones((1, 16, 1, 2, 2), np.float32), (), 5)


@pytest.fixture
def snapshots(tmp_path):
    snapshots = Snapshots(str(tmp_path))
    snapshots.save(NAME, 5, STATE)
    return snapshots


def load(snapshots):
    """Load the snapshot as a leader does; nothing of its slice is asked for that."""
    return asyncio.run(Snapshotter(AsyncSlice(None, None), snapshots, Objects()).load(NAME, 5))


class Objects:
    """An object store whose references are the objects."""

    def get(self, ref):
        return ref

    def put(self, value):
        return value


class Scope:
    """Of a request of which nobody knows more than this."""

    def __init__(self, finished=False):
        self.finished = finished

    async def is_finished(self):
        return self.finished


def keep(snapshots, step, scope):
    """Save a state as a leader does, beside its request's next steps."""

    async def run():
        snapshotter = Snapshotter(AsyncSlice(None, None), snapshots, Objects())
        snapshotter.keep(SliceRequest("video", None, scope, NAME), step, pack(dataclasses.replace(STATE, step=step)))
        await asyncio.gather(*snapshotter._writing.values())

    asyncio.run(run())


def test_one_that_can_t_be_read_now_is_kept(snapshots, tmp_path):
    whole = (tmp_path / FILE).rename(tmp_path / "aside")
    (tmp_path / FILE).symlink_to("/proc/self/mem")  # can be opened; reading it is an input/output error
    with pytest.raises(StorageError):
        snapshots.load(NAME, 5)
    with pytest.raises(StageInterrupted):
        load(snapshots)
    assert snapshots.find_newest(NAME) == 5
    whole.rename(tmp_path / FILE)
    assert snapshots.load(NAME, 5).step == 5


def test_a_damaged_one_is_deleted(snapshots, tmp_path):
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:100])
    with pytest.raises(StageInterrupted):
        load(snapshots)
    assert snapshots.find_newest(NAME) is None


def test_one_that_is_gone_has_been_replaced(snapshots):
    snapshots.forget(NAME, 5)
    with pytest.raises(StageInterrupted):
        load(snapshots)


def test_one_that_can_t_be_saved_is_told_and_raises_nothing(snapshots, tmp_path, caplog):
    keep(Snapshots(str(tmp_path / FILE)), 6, Scope())  # below a file nothing can be written
    assert "video.0123456789abcdef after step 6" in caplog.text
    keep(snapshots, 6, Scope())
    assert snapshots.find_newest(NAME) == 6


def test_snapshot_that_is_written_after_its_request_was_forgotten_is_deleted(snapshots):
    delete_snapshots(snapshots.delete, NAME)
    keep(snapshots, 7, Scope(finished=True))
    assert snapshots.find_newest(NAME) is None


def test_deleting_a_request_s_snapshots_leaves_those_of_another_with_its_id(snapshots):
    other = "video.ffffffffffffffff"
    snapshots.save(other, 5, STATE)
    snapshots.delete(NAME)
    assert (snapshots.find_newest(NAME), snapshots.find_newest(other)) == (None, 5)
    snapshots.delete_all_of("video")
    assert snapshots.find_newest(other) is None


@pytest.mark.parametrize("id_", ["x" * 200, "é" * 100, "x" * 199 + "y", "short"])
def test_ids_of_any_length_have_snapshots(tmp_path, id_):
    snapshots = Snapshots(str(tmp_path))
    name = name_of(id_, SPEC.plan(GenerationRequest(prompt="a")).request, "model")
    snapshots.save(name, 5, STATE)
    assert snapshots.find_newest(name) == 5
    assert len(snapshots.list_names(id_)) == 1
    assert not snapshots.list_names("x" * 150)


def name_with(request):
    return name_of("cat", published_spec("wan2.1-t2v-1.3b").plan(request).request, "model")


def test_snapshots_of_models_without_sound_keep_the_names_that_they_had_before_any_made_it():
    silent = GenerationRequest(prompt="a cat", negative_prompt="", steps=7, shift=3.0)
    assert name_with(silent) == name_with(dataclasses.replace(silent, generate_audio=False)) == "cat.b915e95a8f0ba8a3"
    requests = (GenerationRequest(prompt="a cat", generate_audio=sound) for sound in (None, True, False))
    names = [name_of("cat", SOUND_SPEC.plan(request).request, "model") for request in requests]
    assert names[0] == names[1] != names[2]


def test_name_changes_when_an_adapter_or_a_video_is_replaced(tmp_path):
    adapter, film = tmp_path / "style.safetensors", tmp_path / "film.mp4"
    adapter.write_bytes(b"first")
    film.write_bytes(b"first")
    size = {"height": 480, "width": 832}  # Or the video would be read for its own.
    request = GenerationRequest(prompt="a", loras=[str(adapter)], video=str(film), strength=0.5, **size)
    first = name_with(request)
    os.utime(adapter, (1, 1))  # the same content
    assert name_with(request) == first
    adapter.write_bytes(b"other")
    second = name_with(request)
    film.write_bytes(b"other")
    assert len({first, second, name_with(request)}) == 3


def test_name_has_a_video_s_content_and_not_which_frames_are_written():
    size = {"height": 480, "width": 832}
    videos = (GenerationRequest(prompt="a", video=VideoContent(content), **size) for content in (b"a", b"a", b"b"))
    first, again, other = map(name_with, videos)
    assert first == again != other
    plain = published_spec("wan2.1-t2v-1.3b").plan(GenerationRequest(prompt="a")).request
    assert name_of("cat", plain, "model") == name_of("cat", dataclasses.replace(plain, hidden_frames=1), "model")


def test_name_of_a_request_whose_adapter_can_t_be_reached_has_its_path_alone(monkeypatch, caplog):
    monkeypatch.setattr(base, "OUTAGE_S", 0.1)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens there
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{bound.getsockname()[1]}")
        names = {name_with(GenerationRequest(prompt="a", loras=[f"gs://bucket/x/{n}.safetensors"])) for n in "aab"}
    assert len(names) == 2
    assert "gs://bucket/x/a.safetensors" in caplog.text


def test_a_large_adapter_is_read_once(tmp_path, monkeypatch):
    """A name is made for every request, and requests share their adapters."""
    adapter = tmp_path / "style.safetensors"
    adapter.write_bytes(b"first")
    os.utime(adapter, (1, 1))  # long ago
    request = GenerationRequest(prompt="a", loras=[str(adapter)])
    name = name_with(request)
    monkeypatch.setattr("hashlib.file_digest", None)
    assert name_with(request) == name
