"""Shared by the tests of the glue: an emulator of Google Cloud Storage over HTTP, and both kinds of storage."""

import itertools

import pytest

from actors.storage.gcs import GcsStorage
from actors.storage.opening import open_storage
from tests.actors.gcs_server import Emulator

_FOLDERS = itertools.count()


@pytest.fixture(scope="session")
def emulator():
    made = Emulator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", made.address)
        made.make_bucket("videos")
        yield made
    made.close()


@pytest.fixture
def gcs_prefix(emulator):
    """A gs:// prefix that nobody else uses."""
    emulator.failures.clear()
    return f"gs://videos/test-{next(_FOLDERS)}"


@pytest.fixture
def gcs(gcs_prefix):
    bucket, _, prefix = gcs_prefix.removeprefix("gs://").partition("/")
    return GcsStorage(bucket, prefix)


@pytest.fixture(params=["folder", "gs"])
def storage(request, tmp_path):
    """The same cases run on a folder and on gs://."""
    return open_storage(tmp_path / "out") if request.param == "folder" else request.getfixturevalue("gcs")
