"""Shared by the tests of the glue: emulators of buckets, all kinds of storage, and a cluster of one slice."""

import contextlib
import dataclasses
import itertools

import pytest

from cluster.emulation.cluster import EmulatedCluster, EmulatedSlice
from cluster.slice_spec import SliceSpec
from tests.actors import gcs_server, s3_server
from wan_tpu.storage.base import BucketStorage
from wan_tpu.storage.opening import open_bucket, open_storage

_FOLDERS = itertools.count()


@pytest.fixture(scope="session")
def emulator():
    yield from _start(gcs_server.Emulator())


@pytest.fixture(scope="session")
def s3_emulator():
    yield from _start(s3_server.Emulator())


def _start(emulator):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in emulator.environment.items():
            patch.setenv(name, value)
        emulator.make_bucket("videos")
        yield emulator
    emulator.close()


@pytest.fixture
def gcs_prefix(emulator):
    """A gs:// prefix that nobody else uses."""
    emulator.failures.clear()
    return f"gs://videos/test-{next(_FOLDERS)}"


@pytest.fixture
def gcs(gcs_prefix):
    return open_bucket(gcs_prefix)


@dataclasses.dataclass
class Bucket:
    """A prefix of an emulated bucket that nobody else uses.

    endpoint  the environment variable that says where the service is
    uploads   the method of an upload's requests
    rights    what an account needs, as messages say it
    """

    address: str
    emulator: object
    endpoint: str
    uploads: str
    rights: str

    @property
    def storage(self) -> BucketStorage:
        return open_bucket(self.address)

    @property
    def scheme(self) -> str:
        return self.address.partition("videos")[0]


@pytest.fixture(params=["gs", "s3"])
def bucket(request):
    """The same cases run on the buckets of each service."""
    if request.param == "gs":
        service = request.getfixturevalue("emulator"), "STORAGE_EMULATOR_HOST", "POST", "roles/storage.objectUser"
    else:
        service = request.getfixturevalue("s3_emulator"), "AWS_ENDPOINT_URL", "PUT", "s3:PutObject"
    service[0].failures.clear()
    return Bucket(f"{request.param}://videos/test-{next(_FOLDERS)}", *service)


@pytest.fixture(params=["folder", "gs", "s3"])
def storage(request, tmp_path):
    """The same cases run on a folder and on the buckets of each service."""
    if request.param == "folder":
        return open_storage(tmp_path / "out")
    request.getfixturevalue("emulator" if request.param == "gs" else "s3_emulator").failures.clear()
    return open_bucket(f"{request.param}://videos/test-{next(_FOLDERS)}")


@pytest.fixture(scope="package")
def one_slice(tmp_path_factory, forks):
    """An emulated cluster of one slice of one host, whose processes work in another folder. Modules join and leave."""
    folder = tmp_path_factory.mktemp("one-slice")
    with contextlib.chdir(folder):
        cluster = EmulatedCluster.start((EmulatedSlice("one", SliceSpec("v6e-1"), 1),), folder=folder, forks=forks)
    with cluster:
        yield cluster
