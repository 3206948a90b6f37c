"""The same cases on a folder and on buckets (real clients, real HTTP), and what each can do wrong in its own way."""

import hashlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import requests
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from google.oauth2 import service_account

from tests.actors import s3_server
from tests.conftest import ROOT
from wan_tpu.errors import InvalidInput
from wan_tpu.storage import base, s3
from wan_tpu.storage.addresses import absolute, split_location
from wan_tpu.storage.base import Missing, Refused, StorageError
from wan_tpu.storage.local import LocalStorage
from wan_tpu.storage.opening import open_storage


def test_what_is_written_is_read(storage):
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


def test_missing_says_where(storage):
    with pytest.raises(Missing, match=r"nothing.mp4 does not exist"):
        storage.read("nothing.mp4")


@pytest.mark.parametrize(
    "name", ["", "../out.mp4", "/etc/passwd", "a//b", "a/./b", "a\\b", ".hidden", "a\n", "x" * 201]
)
def test_names_stay_in_their_folder(storage, name):
    for act in (storage.read, storage.size, storage.delete, lambda name: storage.write(name, b"")):
        with pytest.raises(StorageError, match="the name"):
            act(name)


def test_probe_leaves_nothing(storage):
    storage.probe()
    assert storage.list() == {}
    with storage.claim(["cat.mp4"]):
        assert storage.list() == {}


def test_a_hidden_folder_is_a_place_of_its_own(storage):
    """As a batch's snapshots are, below its output."""
    below = open_storage(storage.location() + "/.snapshots")
    below.write("cat.safetensors", b"state")
    assert below.list() == {"cat.safetensors": 5}
    assert below.read("cat.safetensors") == b"state"
    assert storage.list() == {}


def test_storage_travels(storage):
    storage.write("cat.mp4", b"video")
    there = pickle.loads(pickle.dumps(storage))
    assert there.location("cat.mp4") == storage.location("cat.mp4")
    assert there.read("cat.mp4") == b"video"


def test_locations(tmp_path, bucket):
    scheme = bucket.scheme
    assert open_storage(tmp_path).location("a/b.mp4") == f"{tmp_path}/a/b.mp4"
    assert open_storage(bucket.address + "/").location("a/b.mp4") == f"{bucket.address}/a/b.mp4"
    assert split_location(f"{scheme}bucket/a/b.png") == (f"{scheme}bucket/a", "b.png")
    assert split_location(f"{scheme}bucket/b.png") == (f"{scheme}bucket", "b.png")
    assert split_location("a/b.png") == ("a", "b.png")
    assert absolute(f"{scheme}bucket/a") == f"{scheme}bucket/a"
    with pytest.raises(InvalidInput, match="az://x is neither a folder nor gs://bucket/prefix or s3://"):
        open_storage("az://x")
    with pytest.raises(InvalidInput, match="neither a folder nor gs://"):
        open_storage(Path(f"{scheme}videos/run"))  # which is gs:/videos/run
    with pytest.raises(InvalidInput, match=f"names no bucket; give {scheme}bucket/prefix"):
        open_storage(scheme)


# ---- folders


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The outcome of each case of storage_worker.py, and its folder."""
    folder = tmp_path_factory.mktemp("limits")
    for path in (folder, *folder.parents):
        if not path.stat().st_mode & 0o001:
            path.chmod(0o755)  # so that another user gets as far as the folder that is closed to it
    command = [sys.executable, "-m", "tests.actors.storage_worker", str(folder)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return {case: lines for case, *lines in json.loads(done.stdout)}, folder


def lines_of(outcomes, case):
    lines = outcomes[0][case]
    if lines[0].startswith("refused: "):
        pytest.skip(f"this machine lets nobody mount in a namespace of their own: {lines[0]}")
    return lines


def test_a_full_disk(outcomes):
    probe, error, left = lines_of(outcomes, "full")
    assert probe == "probe: well"
    where = outcomes[1] / "full" / "large.mp4"
    assert error == f"can't write {where} (No space left on device); make room, or choose a folder on another disk"
    assert left == "['small.txt']"  # no half file


def test_a_disk_full_from_the_start(outcomes):
    error, left = lines_of(outcomes, "full from the start")
    assert error.startswith(f"can't write {outcomes[1]}/full from the start (No space left on device); make room")
    assert left == "['zeros']"


def test_a_read_only_disk(outcomes):
    error, _ = lines_of(outcomes, "read-only")
    assert (
        error == f"can't write {outcomes[1]}/read-only (Read-only file system); choose a folder that can be written to"
    )


def test_a_limit_on_file_sizes(outcomes):
    _, error, left = lines_of(outcomes, "limit")
    assert error.startswith(f"can't write {outcomes[1]}/limit/large.mp4 (File too large); raise the limit")
    assert left == "['small.txt']"


def test_a_folder_of_somebody_else(outcomes):
    error, _ = lines_of(outcomes, "nobody")
    assert error == f"can't write {outcomes[1]}/nobody (Permission denied); choose a folder that can be written to"


def test_files_are_their_user_s_own_whatever_the_folder_and_the_umask_are(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    before = os.umask(0o022)
    try:
        LocalStorage(shared).write("a/snapshot.safetensors", b"latents")
        with LocalStorage(shared).claim([]):
            files = [path for path in shared.rglob("*") if path.is_file()]
    finally:
        os.umask(before)
    assert len(files) == 2 and all(path.stat().st_mode & 0o777 == 0o600 for path in files)


def test_a_folder_that_can_t_be_listed_isn_t_empty(tmp_path):
    """As a file system that is away for a while: for a request it would say that it has no snapshot."""
    assert LocalStorage(tmp_path / "not yet").list() == {}
    (tmp_path / "away").write_text("no folder")
    with pytest.raises(StorageError, match=r"can't read .*away"):
        LocalStorage(tmp_path / "away").list()


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "out" / "cat.mp4").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"can't write .*file/out"):
        LocalStorage(tmp_path / "file" / "out").probe()
    with pytest.raises(StorageError, match=r"can't write .*cat.mp4"):
        LocalStorage(tmp_path / "out").write("cat.mp4", b"")
    with pytest.raises(StorageError, match=r"can't read .*cat.mp4"):
        LocalStorage(tmp_path / "out").read("cat.mp4")


_HOLD = """
import sys, time
from wan_tpu.storage.local import LocalStorage
with LocalStorage(sys.argv[1]).claim(["cat.mp4"]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_writer_at_a_time_and_none_after_its_death(tmp_path):
    storage = LocalStorage(tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match=f"being written to by process {holder.pid} on "):
            with storage.claim([]):
                pass
        # What a killed writer leaves: ours is removed, what somebody else is writing there isn't.
        (tmp_path / ".cat.mp4.0123456789ab.partial").write_bytes(b"half")
        (tmp_path / ".dog.mp4.0123456789ab.partial").write_bytes(b"half")
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        with storage.claim(["cat.mp4"]):
            assert [path.name for path in tmp_path.glob("*.partial")] == [".dog.mp4.0123456789ab.partial"]
    finally:
        holder.kill()
        holder.wait(10)


# ---- buckets


def test_no_bucket(bucket):
    missing = open_storage(f"{bucket.scheme}no-such-bucket/run")
    for act in (missing.probe, missing.list, lambda: missing.write("cat.mp4", b"")):
        with pytest.raises(Refused, match="there is no bucket 'no-such-bucket'; make it"):
            act()
    for look in (missing.read, missing.size):
        with pytest.raises(Missing, match="does not exist"):
            look("cat.mp4")


def test_passing_errors_are_retried(bucket):
    storage = bucket.storage
    bucket.emulator.failures += [(503, "Service Unavailable", "before")]
    storage.write("cat.mp4", b"video")
    bucket.emulator.failures += [(429, "Too Many Requests", "before")]
    assert storage.read("cat.mp4") == b"video"
    assert not bucket.emulator.failures


def test_an_upload_whose_answer_is_lost_is_repeated(bucket):
    storage, seen = bucket.storage, bucket.emulator.seen
    bucket.emulator.failures += [(503, "Service Unavailable", "after")]
    before = len(seen)
    storage.write("job.json", b"mine")
    assert len([line for line in seen[before:] if line.startswith(bucket.uploads)]) == 2
    assert storage.read("job.json") == b"mine"


def test_not_allowed_names_the_rights(bucket):
    storage = bucket.storage
    bucket.emulator.failures += [(403, "Access Denied", "before")]
    with pytest.raises(Refused, match=rf"can't write {storage.location()}.*not allowed.*{bucket.rights}"):
        storage.probe()


def test_large_objects_go_up_in_a_resumable_upload(gcs, emulator):
    content = os.urandom(9_000_000)  # the client's limit for one request is 8 MB
    gcs.write("large.mp4", content)
    assert any("uploadType=resumable" in line for line in emulator.seen)
    assert gcs.read("large.mp4") == content


def test_nobody_answers(bucket, monkeypatch):
    monkeypatch.setenv(bucket.endpoint, "http://127.0.0.1:9")  # the discard port: nothing listens
    monkeypatch.setattr(base, "OUTAGE_S", 2.0)
    start = time.monotonic()
    with pytest.raises(StorageError, match=rf"the service did not answer .*{bucket.endpoint}") as raised:
        bucket.storage.probe()
    assert time.monotonic() - start < 15
    assert not isinstance(raised.value, Refused)


def test_no_google_credentials(tmp_path, monkeypatch):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(Refused, match=r"no usable Google credentials .*gcloud auth application-default login"):
        open_storage("gs://videos")


@pytest.mark.parametrize(
    ("environment", "kind"), [({}, StorageError), ({"AWS_PROFILE": "nobody"}, Refused)], ids=["none", "no profile"]
)
def test_no_amazon_credentials(environment, kind, tmp_path, monkeypatch):
    for name in s3_server.ACCOUNT:
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StorageError, match=r"no usable AWS configuration .*aws configure") as raised:
        open_storage("s3://videos")
    assert type(raised.value) is kind


def test_a_client_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "wan_tpu.storage.s3", raising=False)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(InvalidInput, match=r"s3:// needs Amazon's client: pip install '\.\[s3\]'"):
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
        asked = [line for line in bucket.emulator.seen if "alt=media" in line and "a.bin" in line]
        assert len(asked) == 2 and all(f"generation={version}" in line for line in asked)
        return
    with pytest.raises(Missing, match="was replaced meanwhile"):
        storage.read_version("a.bin", version, 1, 3)
    with pytest.raises(Missing, match="was replaced meanwhile"):
        storage.download("a.bin", version, tmp_path / "b.bin")


def test_what_a_killed_writer_has_uploaded_is_removed_in_time(s3_emulator, monkeypatch):
    monkeypatch.setattr(s3, "PART_BYTES", 5 * 2**20)
    storage = open_storage("s3://videos/killed")
    upload = s3._Upload(storage, "video.mp4")
    upload.write(bytes(6 * 2**20))  # A part is there, and then nothing comes any more.
    assert uploads_of(storage) == 1
    storage.clean(100 * 365 * 86400)
    assert uploads_of(storage) == 1  # Perhaps it is being written: moto says of all uploads that they began in 2010.
    storage.clean(3600)
    assert uploads_of(storage) == 0


def uploads_of(storage):
    return len(storage.client.list_multipart_uploads(Bucket=storage.bucket, Prefix=storage.prefix).get("Uploads", ()))


# ---- parts of content


@pytest.mark.parametrize("size", [1000, 12_000_000])
def test_what_is_written_in_pieces_is_there_whole_or_not_at_all(storage, size, monkeypatch):
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
        assert uploads_of(storage) == 0


def test_a_part_is_read_without_the_rest(storage):
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


def test_download_goes_on_where_its_connection_broke(bucket):
    content, storage = os.urandom(3_000_000), bucket.storage
    storage.write("a.mp4", content)
    file = storage.open("a.mp4")
    bucket.emulator.failures += [(503, "Service Unavailable", "before")]
    first = file.read(1_000_000)
    answer = file._body._raw_stream if bucket.scheme == "s3://" else file._answer.raw
    answer._fp.fp.raw._sock.shutdown(socket.SHUT_RDWR)
    pieces = list(iter(lambda: file.read(1_000_000), b""))
    file.close()
    assert first + b"".join(pieces) == content and not bucket.emulator.failures


def test_what_a_killed_writer_has_left_is_removed_in_time(tmp_path):
    """A write is killed in its middle: what it leaves is hidden, and is nobody's."""
    code = "import sys, pathlib; from wan_tpu.storage.local import LocalStorage; storage = LocalStorage(sys.argv[1])\n"
    code += "with storage._partial(pathlib.Path(sys.argv[1], 'below/video.mp4')):\n"
    code += "    print('here', flush=True); sys.stdin.read()"
    (tmp_path / "below").mkdir()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT, **pipes) as writer:
        writer.stdout.readline()
        writer.kill()
    storage = open_storage(tmp_path)
    storage.write("below/whole.mp4", b"whole")
    [left] = (tmp_path / "below").glob(".*")
    storage.clean(3600)
    assert left.exists()  # perhaps it is being written
    os.utime(left, (0, 0))
    storage.clean(3600)
    assert not left.exists()
    assert storage.list() == {"below/whole.mp4": 5}


def test_an_address_that_amazon_signs_is_downloaded_by_anybody(s3_emulator):
    storage = open_storage("s3://videos/signed")
    storage.write("a/cat.mp4", b"video")
    answer = requests.get(storage.url("a/cat.mp4", 90, "video_1.mp4"), timeout=10)
    assert answer.content == b"video"
    assert answer.headers["Content-Disposition"] == 'inline; filename="video_1.mp4"'
    assert answer.headers["Content-Type"] == "video/mp4"


def test_an_address_is_signed_for_a_while(gcs, tmp_path):
    assert open_storage(tmp_path).url("cat.mp4", 60, "cat.mp4") is None
    assert gcs.url("cat.mp4", 60, "cat.mp4") is None  # nobody signs for an emulator
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    account = {"client_email": "wan@project.iam.gserviceaccount.com", "token_uri": "https://x/", "private_key": pem}
    gcs._client._credentials = service_account.Credentials.from_service_account_info(account)
    url = urlsplit(gcs.url("a/cat.mp4", 90, "video_1.mp4"))
    asked = parse_qs(url.query)
    assert url.path.endswith("/a/cat.mp4") and asked["X-Goog-Expires"] == ["90"]
    assert asked["response-content-disposition"] == ['inline; filename="video_1.mp4"']
    assert asked["X-Goog-Credential"][0].startswith(account["client_email"])
    # Google's description of what is signed: https://cloud.google.com/storage/docs/authentication/signatures
    signature = bytes.fromhex(asked["X-Goog-Signature"][0])
    query = url.query.partition("&X-Goog-Signature")[0]
    canonical = "\n".join(["GET", url.path, query, f"host:{url.netloc}", "", "host", "UNSIGNED-PAYLOAD"])
    scope = "/".join(asked["X-Goog-Credential"][0].split("/")[1:])
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join([asked["X-Goog-Algorithm"][0], asked["X-Goog-Date"][0], scope, digest])
    key.public_key().verify(signature, text.encode(), padding.PKCS1v15(), hashes.SHA256())
