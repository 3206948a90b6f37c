"""Snapshots are insurance: what happens to their storage costs no request, and deletes none that may be whole."""

import asyncio

import numpy as np
import pytest

from actors.errors import StageLost
from actors.slices.async_slice import AsyncSlice
from actors.slices.snapshots import Snapshots, Snapshotter
from actors.storage.base import StorageError
from wan_tpu.data import DenoiseState

NAME = "video.0123456789abcdef"
FILE = f"{NAME}.0005.safetensors"
STATE = DenoiseState(np.ones((1, 16, 1, 2, 2), np.float32), (), 5)


@pytest.fixture
def snapshots(tmp_path):
    made = Snapshots(str(tmp_path))
    made.save(NAME, 5, STATE)
    return made


def load(snapshots):
    """Load the snapshot as a leader does; nothing of its slice is asked for that."""
    slice_ = AsyncSlice(None, None)
    return asyncio.run(Snapshotter(slice_, snapshots).load(NAME, 5))


def test_one_that_can_t_be_read_now_is_kept(snapshots, tmp_path):
    whole = (tmp_path / FILE).rename(tmp_path / "aside")
    (tmp_path / FILE).symlink_to("/proc/self/mem")  # can be opened; reading it is an input/output error
    with pytest.raises(StorageError, match="Input/output error"):
        snapshots.load(NAME, 5)
    with pytest.raises(StageLost, match="can't be read now"):
        load(snapshots)
    assert snapshots.newest(NAME) == 5
    whole.rename(tmp_path / FILE)
    assert snapshots.load(NAME, 5).step == 5


def test_a_damaged_one_is_deleted(snapshots, tmp_path):
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:100])
    with pytest.raises(StageLost, match="can't be used and was deleted"):
        load(snapshots)
    assert snapshots.newest(NAME) is None


def test_one_that_is_gone_has_been_replaced(snapshots):
    snapshots.forget(NAME, 5)
    with pytest.raises(StageLost, match="replaced by a newer one"):
        load(snapshots)


def test_one_that_can_t_be_saved_is_told_and_raises_nothing(snapshots, tmp_path):
    class Gone(Snapshotter):
        """Has its state at hand: no slice is asked for it."""

        def _write(self, name, step, ref):
            self._snapshots.save(name, step, STATE)

    snapshotter = Gone(AsyncSlice(None, None), Snapshots(str(tmp_path / FILE)))  # below a file nothing can be written
    assert asyncio.run(snapshotter.save(NAME, 6, None)) is False
    assert asyncio.run(Gone(AsyncSlice(None, None), snapshots).save(NAME, 6, None)) is True
    assert snapshots.newest(NAME) == 6
