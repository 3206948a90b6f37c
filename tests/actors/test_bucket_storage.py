"""What can go wrong with buckets: outages, refusals, lost answers, broken connections, replaced objects."""

import gzip
import hashlib
import os
import socket
import sys
import time
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
import requests
import safetensors.numpy
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from google.oauth2 import service_account

from tests.actors import s3_server
from tests.actors.s3_server import count_uploads
from wan_tpu.checkpoint import weight_file
from wan_tpu.errors import CheckpointError, InvalidInput
from wan_tpu.runtime.tensor_files import locate_tensors
from wan_tpu.runtime.weights import read_tensors
from wan_tpu.storage import base, s3, streaming
from wan_tpu.storage.addresses import PAYERS
from wan_tpu.storage.base import Missing, Refused, StorageError
from wan_tpu.storage.folder import BucketFolder
from wan_tpu.storage.opening import open_storage


def test_missing_bucket_is_named_with_the_command_that_makes_it(bucket):
    missing = open_storage(f"{bucket.scheme}no-such-bucket/run")
    for act in (missing.probe, missing.list, lambda: missing.write("cat.mp4", b"")):
        with pytest.raises(Refused, match="'no-such-bucket'"):
            act()
    for look in (missing.read, missing.size):
        with pytest.raises(Missing):
            look("cat.mp4")


def test_passing_errors_are_retried(bucket):
    storage = bucket.storage
    bucket.emulator.failures += [(503, "Service Unavailable", "before")]
    storage.write("cat.mp4", b"video")
    bucket.emulator.failures += [(429, "Too Many Requests", "before")]
    assert storage.read("cat.mp4") == b"video"
    assert not bucket.emulator.failures


def test_upload_whose_answer_is_lost_is_repeated(bucket):
    storage, seen = bucket.storage, bucket.emulator.seen
    bucket.emulator.failures += [(503, "Service Unavailable", "after")]
    before = len(seen)
    storage.write("job.json", b"mine")
    assert len([line for line in seen[before:] if line.startswith(bucket.uploads)]) == 2
    assert storage.read("job.json") == b"mine"


def test_refused_access_names_the_rights_that_lack(bucket):
    storage = bucket.storage
    bucket.emulator.failures += [(403, "Access Denied", "before")]
    with pytest.raises(Refused, match=rf"{storage.location()}.*{bucket.rights}"):
        storage.probe()


# As R2, older MinIO and others answer a request with Amazon's checksum.
CHECKSUM_REFUSALS = [(501, "NotImplemented"), (401, "Unauthorized"), (400, "InvalidRequest")]


@pytest.fixture
def without_checksums(s3_emulator, monkeypatch):
    monkeypatch.setattr(s3, "PART_BYTES", 5 * 2**20)
    yield s3_emulator
    s3_emulator.refusal = None


def test_service_that_refuses_checksums_is_written_to(without_checksums):
    storage, content = open_storage("s3://videos/plain"), os.urandom(6 * 2**20)
    without_checksums.refusal = 501, "NotImplemented"
    storage.write("small.json", b"{}")
    with storage.writing("large.mp4") as file:
        file.write(content)
    assert (storage.read("small.json"), storage.read("large.mp4")) == (b"{}", content)


@pytest.mark.parametrize("refusal", CHECKSUM_REFUSALS)
def test_checksums_that_a_service_refuses_are_named_at_once(refusal, without_checksums, monkeypatch):
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
    without_checksums.refusal = refusal
    storage, start = open_storage("s3://videos/checked"), time.monotonic()
    with pytest.raises(Refused, match="AWS_REQUEST_CHECKSUM_CALCULATION"):
        storage.write("small.json", b"{}")
    assert time.monotonic() - start < 5


def test_checksums_that_a_service_takes_are_kept_in_the_parts(without_checksums, monkeypatch):
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
    storage, content = open_storage("s3://videos/checked"), os.urandom(6 * 2**20)
    with storage.writing("large.mp4") as file:
        file.write(content)
    assert storage.read("large.mp4") == content


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (403, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
        (400, "ExpiredToken", "expired"),
        (403, "RequestTimeTooSkewed", "clock"),
        (403, "InvalidObjectState", "restore"),
    ],
)
def test_refusals_of_amazon_name_the_remedy_for_their_cause(status, code, remedy, s3_emulator):
    storage = open_storage("s3://videos/refused")
    s3_emulator.failures[:] = [(status, code, "before")]
    with pytest.raises(Refused, match=remedy) as refused:
        storage.read("a.json")
    assert "s3:PutObject" not in str(refused.value) and "again" not in str(refused.value)


@pytest.fixture
def paying(bucket):
    bucket.storage.write("a.json", b"[1, 2]")
    bucket.storage.write("a.safetensors", safetensors.numpy.save({"a": np.arange(6, dtype=np.float32)}))
    bucket.emulator.requester_pays = True
    yield bucket
    bucket.emulator.requester_pays = False


def test_bucket_whose_requester_pays_names_the_variable_for_who_does(paying):
    storage = paying.storage
    for act in (
        lambda: storage.read("a.json"),
        lambda: storage.read("a.json", 1, 3),
        lambda: storage.open("a.json").read(9),
        lambda: storage.size("a.json"),
        storage.list,
        storage.probe,
    ):
        with pytest.raises(Refused, match=PAYERS[paying.scheme]):
            act()


def test_bucket_is_read_whose_requester_pays(paying, monkeypatch):
    monkeypatch.setenv(PAYERS[paying.scheme], "requester")  # A project has this name, too.
    storage = paying.storage
    assert (storage.read("a.json"), storage.read("a.json", 1, 4)) == (b"[1, 2]", b"1, ")
    assert storage.size("a.json") == storage.list()["a.json"] == 6
    file = storage.open("a.json", 1)
    assert file.read(9) == b"1, 2]"
    file.close()
    storage.write("b.json", b"{}")
    storage.delete("b.json")
    if (url := storage.url("a.json", 60, "a.json")) is not None:  # Nobody signs for Google's emulator.
        assert requests.get(url, timeout=10).content == b"[1, 2]"


def test_weights_are_read_from_a_bucket_whose_requester_pays(paying, monkeypatch):
    monkeypatch.setenv(PAYERS[paying.scheme], "requester")
    stored = locate_tensors(weight_file(f"{paying.address}/a.safetensors"))
    assert read_tensors(stored)["a"].tolist() == list(range(6))


def test_weights_that_the_streamer_cant_read_come_from_the_service_s_own_client(bucket, monkeypatch):
    others = {"gs://": "s3://", "s3://": "gs://"}
    monkeypatch.setattr(streaming, "_client", {"scheme": others[bucket.scheme]})  # Of the service that was used first.
    values = {f"{number}": np.full(1000 + number, number, np.float32) for number in range(40)}
    bucket.storage.write("a.safetensors", safetensors.numpy.save(values))
    read = read_tensors(locate_tensors(weight_file(f"{bucket.address}/a.safetensors")))
    assert all(np.array_equal(read[name], value) for name, value in values.items())


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("Caller does not have serviceusage.services.use access to the project", "serviceUsageConsumer"),
        ("The billing account for the owning project is disabled in state absent", "enable billing"),
    ],
)
def test_refusals_of_google_name_the_remedy_for_their_cause(message, remedy, gcs, emulator):
    emulator.failures[:] = [(403, message, "before")]
    with pytest.raises(Refused, match=remedy) as refused:
        gcs.size("a.json")
    assert "storage.objectUser" not in str(refused.value)


def test_compressed_weights_in_a_bucket_are_named(gcs):
    content = safetensors.numpy.save({"a": np.zeros(1000, np.float32)})
    blob = gcs._blob("a.safetensors")
    blob.content_encoding = "gzip"  # As gcloud storage cp --gzip-local uploads it.
    blob.upload_from_string(gzip.compress(content))
    with pytest.raises(CheckpointError, match="gzip"):
        locate_tensors(weight_file(gcs.location("a.safetensors")))


def test_large_objects_go_up_in_a_resumable_upload(gcs, emulator):
    content = os.urandom(9_000_000)  # the client's limit for one request is 8 MB
    gcs.write("large.mp4", content)
    assert any("uploadType=resumable" in line for line in emulator.seen)
    assert gcs.read("large.mp4") == content


def test_silent_service_is_an_outage_and_no_refusal(bucket, monkeypatch):
    monkeypatch.setenv(bucket.endpoint, "http://127.0.0.1:9")  # the discard port: nothing listens
    monkeypatch.setattr(base, "OUTAGE_S", 2.0)
    start = time.monotonic()
    with pytest.raises(StorageError, match=bucket.endpoint) as raised:
        bucket.storage.probe()
    assert time.monotonic() - start < 15
    assert not isinstance(raised.value, Refused)


def test_missing_google_credentials_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(Refused, match="gcloud auth application-default login"):
        open_storage("gs://videos")


@pytest.mark.parametrize(
    ("environment", "kind"), [({}, StorageError), ({"AWS_PROFILE": "nobody"}, Refused)], ids=["none", "no profile"]
)
def test_missing_amazon_credentials_are_named(environment, kind, tmp_path, monkeypatch):
    for name in s3_server.ACCOUNT:
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StorageError, match="aws configure") as raised:
        open_storage("s3://videos")
    assert type(raised.value) is kind


def test_client_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "wan_tpu.storage.s3", raising=False)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(InvalidInput, match=r"pip install '\.\[s3\]'"):
        open_storage("s3://videos/run")


def test_objects_that_were_replaced_are_not_mixed(bucket, tmp_path):
    storage = bucket.storage
    storage.write("a.bin", b"before")
    version = storage.objects()["a.bin"].version
    assert storage.read_version("a.bin", version, 1, 3) == b"ef"
    storage.download("a.bin", version, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == b"before"
    storage.write("a.bin", b"behind")
    assert storage.objects()["a.bin"].version != version
    if bucket.scheme == "gs://":  # Whose emulator keeps no generations, so what is asked for is looked at.
        reads = [line for line in bucket.emulator.seen if "alt=media" in line and "a.bin" in line]
        assert len(reads) == 2 and all(f"generation={version}" in line for line in reads)
        return
    with pytest.raises(Missing):
        storage.read_version("a.bin", version, 1, 3)
    with pytest.raises(Missing):
        storage.download("a.bin", version, tmp_path / "b.bin")


def test_parts_that_a_killed_writer_has_uploaded_are_removed_in_time(s3_emulator, monkeypatch):
    monkeypatch.setattr(s3, "PART_BYTES", 5 * 2**20)
    storage = open_storage("s3://videos/killed")
    upload = s3._Upload(storage, "video.mp4")
    upload.write(bytes(6 * 2**20))  # A part is there, and then nothing comes any more.
    assert count_uploads(storage) == 1
    storage.clean(100 * 365 * 86400)
    assert count_uploads(storage) == 1  # Perhaps it is being written: moto says of all uploads that they began in 2010.
    storage.clean(3600)
    assert count_uploads(storage) == 0


def test_download_goes_on_where_its_connection_broke(bucket):
    content, storage = os.urandom(3_000_000), bucket.storage
    storage.write("a.mp4", content)
    file = storage.open("a.mp4")
    bucket.emulator.failures += [(503, "Service Unavailable", "before")]
    first = file.read(1_000_000)
    answer = file._body._raw_stream if bucket.scheme == "s3://" else file._body
    answer._fp.fp.raw._sock.shutdown(socket.SHUT_RDWR)
    pieces = list(iter(lambda: file.read(1_000_000), b""))
    file.close()
    assert first + b"".join(pieces) == content and not bucket.emulator.failures


def test_address_that_amazon_signs_is_downloaded_by_anybody(s3_emulator):
    storage = open_storage("s3://videos/signed")
    storage.write("a/cat.mp4", b"video")
    answer = requests.get(storage.url("a/cat.mp4", 90, "video_1.mp4"), timeout=10)
    assert answer.content == b"video"
    assert answer.headers["Content-Disposition"] == 'inline; filename="video_1.mp4"'
    assert answer.headers["Content-Type"] == "video/mp4"


def test_address_in_google_s_bucket_is_signed_for_a_while(gcs, tmp_path):
    assert open_storage(tmp_path).url("cat.mp4", 60, "cat.mp4") is None
    assert gcs.url("cat.mp4", 60, "cat.mp4") is None  # nobody signs for an emulator
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    account = {"client_email": "wan@project.iam.gserviceaccount.com", "token_uri": "https://x/", "private_key": pem}
    gcs._client._credentials = service_account.Credentials.from_service_account_info(account)
    url = urlsplit(gcs.url("a/cat.mp4", 90, "video_1.mp4"))
    parameters = parse_qs(url.query)
    assert url.path.endswith("/a/cat.mp4") and parameters["X-Goog-Expires"] == ["90"]
    assert parameters["response-content-disposition"] == ['inline; filename="video_1.mp4"']
    assert parameters["X-Goog-Credential"][0].startswith(account["client_email"])
    # Google's description of what is signed: https://cloud.google.com/storage/docs/authentication/signatures
    signature = bytes.fromhex(parameters["X-Goog-Signature"][0])
    query = url.query.partition("&X-Goog-Signature")[0]
    canonical = "\n".join(["GET", url.path, query, f"host:{url.netloc}", "", "host", "UNSIGNED-PAYLOAD"])
    scope = "/".join(parameters["X-Goog-Credential"][0].split("/")[1:])
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join([parameters["X-Goog-Algorithm"][0], parameters["X-Goog-Date"][0], scope, digest])
    key.public_key().verify(signature, text.encode(), padding.PKCS1v15(), hashes.SHA256())


def test_file_of_weights_is_read_by_its_name_without_a_list(bucket):
    bucket.storage.write("model/a.safetensors", b"0123456789")
    folder = BucketFolder(f"{bucket.address}/model")
    bucket.emulator.seen.clear()
    file = weight_file(f"{bucket.address}/model/a.safetensors")
    assert (file.size, file.read(2, 5)) == (10, b"234")
    seen = bucket.emulator.seen
    assert len([line for line in seen if "a.safetensors" in line]) == 2  # Its size and version, and the range.
    assert not [line for line in seen if "prefix=" in line]
    assert file.version == folder.find("a.safetensors").version == folder.files()["a.safetensors"].version
    assert folder.find("b.safetensors") is None


def test_client_of_a_bucket_is_kept_until_its_environment_changes(s3_emulator, monkeypatch):
    client = open_storage("s3://videos/a").client
    assert open_storage("s3://videos/b").client is client
    assert open_storage("s3://others/a").client is not client
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    other = open_storage("s3://videos/a").client
    assert (client.meta.endpoint_url, other.meta.endpoint_url) == (s3_emulator.address, "http://127.0.0.1:9")
