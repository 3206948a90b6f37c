"""Amazon S3, and services that speak its protocol, with Amazon's own client.

The client finds credentials and region in its usual way; AWS_ENDPOINT_URL redirects everything to another service.
"""

import contextlib
import datetime
import functools
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

import urllib3
from google.api_core.retry import exponential_sleep_generator, retry_target

from wan_tpu.errors import InvalidInput
from wan_tpu.sources.statuses import is_refusal
from wan_tpu.storage import base
from wan_tpu.storage.addresses import PAYERS
from wan_tpu.storage.base import (
    BucketStorage,
    Download,
    Missing,
    OpenFile,
    Refused,
    StorageError,
    StoredObject,
    check_name,
    content_type,
    first_line,
)

try:
    import boto3
    from botocore import exceptions as aws
    from botocore.config import Config
except ImportError:
    raise InvalidInput("s3:// needs Amazon's client: pip install '.[s3]'") from None

PART_BYTES = 32 * 2**20  # Size of a part of an upload. S3 takes 10,000 parts, each but the last of at least 5 MiB.
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 20.0
MAX_CLIENTS = 16  # The number of buckets whose clients are kept.
# The client makes a single attempt; `repeat` repeats it for as long as an outage may last. Its own retries count
# attempts, share a quota that a few calls use up in an outage, and don't cover the body of a download.
_CONFIG = Config(
    connect_timeout=10, read_timeout=60, max_pool_connections=32, retries={"mode": "standard", "total_max_attempts": 1}
)
# Amazon's client adds a checksum (CRC32) to all it writes, which R2, older MinIO and others refuse.
_OTHER_SERVICE = _CONFIG.merge(
    Config(request_checksum_calculation="when_required", response_checksum_validation="when_required")
)
_CHECKSUMS = "AWS_REQUEST_CHECKSUM_CALCULATION"
_PAYER = PAYERS["s3://"]
_KEYS = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or the profile in AWS_PROFILE"
_REGION = "set AWS_DEFAULT_REGION to the bucket's region"
# What to do, by the service's error code; the same status (403, 400) has many causes.
_REMEDIES = {
    "InvalidAccessKeyId": _KEYS,
    "SignatureDoesNotMatch": _KEYS,
    "InvalidToken": _KEYS,
    "ExpiredToken": "the credentials have expired; get new ones, such as with aws sso login",
    "RequestTimeTooSkewed": "this machine's clock is wrong; set it",
    "InvalidObjectState": "the object is archived; restore it first (aws s3api restore-object)",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
}
_SILENCE = (
    aws.ConnectionError,
    aws.HTTPClientError,
    aws.IncompleteReadError,
    aws.ResponseStreamingError,
    urllib3.exceptions.HTTPError,
)

T = TypeVar("T")


class S3Storage(BucketStorage):
    """The objects below s3://bucket/prefix."""

    scheme = "s3://"
    bucket_pattern = re.compile(r"[a-z0-9][-.a-z0-9]{1,61}[a-z0-9]")  # docs.aws.amazon.com, bucketnamingrules.html
    jax_can_write = False

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(bucket, prefix)
        with self._explain_errors("open", self.location()):
            settings = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
            self.client = _make_client(bucket, frozenset(settings.items()))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the content of the object; the client verifies the checksum of a whole one."""
        where = check_name(name)
        if stop is not None and stop <= start:
            return b""
        span = _span(start, stop) if start or stop is not None else {}
        return self.call("read", where, lambda key: self._get(key, **span).read())

    def open(self, name: str, start: int = 0) -> OpenFile:
        """Open the version of the object that is there now; its bytes come in one download."""
        version = self.call("read", check_name(name), self._head)["ETag"]

        def connect(at: int) -> Any:
            return self._get(self.key(name), version, **(_span(at) if at else {}))

        return Download(connect, lambda read: self.call("read", name, lambda _: read()), start)

    def stat(self, name: str) -> StoredObject:
        """Return the size and the ETag of the object."""
        head = self.call("look for", check_name(name), self._head)
        return StoredObject(int(head["ContentLength"]), head["ETag"])

    def objects(self, prefix: str = "") -> dict[str, StoredObject]:
        """Return all objects below the prefix; their versions are ETags."""
        below = self.key("")
        return {
            item["Key"].removeprefix(below): StoredObject(item["Size"], item["ETag"])
            for item in self._list("list_objects_v2", "Contents", prefix)
            if not item["Key"].endswith("/")  # the empty objects that consoles make as folders
        }

    def read_version(self, name: str, version: str, start: int, stop: int) -> bytes:
        """Return bytes of the object while it has that ETag."""
        return self.call("read", name, lambda key: self._get(key, version, **_span(start, stop)).read())

    def download(self, name: str, version: str, path: Path) -> None:
        """Write the object to a file while it has that ETag."""

        def copy(key: str) -> None:
            with path.open("wb") as file:
                for piece in self._get(key, version).iter_chunks(PART_BYTES):
                    file.write(piece)

        self.call("read", name, copy)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Provide a file that is uploaded in parts as it is written, without a local copy."""
        upload = _Upload(self, check_name(name))
        try:
            yield cast(BinaryIO, upload)
            upload.finish()
        except BaseException:
            upload.abort()
            raise

    def upload(self, name: str, content: bytes) -> None:
        """Upload the object in a single call, which allows at most 5 GB."""
        self.call("write", name, lambda key: self.client.put_object(
            Bucket=self.bucket, Key=key, Body=content, ContentType=content_type(name)
        ))  # fmt: skip

    def remove(self, name: str) -> None:
        """Remove the object."""
        self.call("delete", name, lambda key: self.client.delete_object(Bucket=self.bucket, Key=key))

    def clean(self, older_s: float) -> None:
        """Remove the parts of uploads that began longer ago than that and never finished."""
        before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=older_s)
        for upload in self._list("list_multipart_uploads", "Uploads"):
            if upload["Initiated"] <= before:
                _Upload(self, upload["Key"].removeprefix(self.key("")), upload["UploadId"]).abort()

    def url(self, name: str, seconds: float, filename: str) -> str | None:
        """Return an address signed with the credentials that this process has."""
        with self._explain_errors("sign an address of", self.location(check_name(name))):
            parameters = {"Bucket": self.bucket, "Key": self.key(name)}
            parameters |= {"ResponseContentDisposition": f'inline; filename="{filename}"'}
            signed: str = self.client.generate_presigned_url("get_object", Params=parameters, ExpiresIn=round(seconds))
            return signed

    def call(self, action: str, name: str, ask: Callable[[str], T]) -> T:
        """Return what `ask` returns for an object's key, repeating it until an outage has lasted too long."""
        with self._explain_errors(action, self.location(name)):
            return repeat(lambda: ask(self.key(name)))

    def _get(self, key: str, version: str | None = None, **span: str) -> Any:
        match = {} if version is None else {"IfMatch": version}
        return self.client.get_object(Bucket=self.bucket, Key=key, **match, **span)["Body"]

    def _head(self, key: str) -> Any:
        return self.client.head_object(Bucket=self.bucket, Key=key)

    def _list(self, method: str, part: str, prefix: str = "") -> list[dict[str, Any]]:
        def ask(key: str) -> list[dict[str, Any]]:
            pages = self.client.get_paginator(method).paginate(Bucket=self.bucket, Prefix=key)
            return [item for page in pages for item in page.get(part, ())]

        return self.call("list", prefix, ask)

    @contextlib.contextmanager
    def _explain_errors(self, action: str, where: str) -> Iterator[None]:
        """Turn what the client raises into errors of this package, by whose fault it is."""
        try:
            yield
        except aws.ClientError as error:
            raise self._explain(action, where, error) from None
        except _SILENCE as error:
            raise StorageError(
                f"can't {action} {where}: the service did not answer ({first_line(error)}); "
                "check the network (and AWS_ENDPOINT_URL, if set), and run this again"
            ) from None
        except aws.BotoCoreError as error:
            # Without a key, credentials come from the machine's metadata server, whose silence, as when a pod has just
            # started, can't be told from its absence.
            passing = (aws.NoCredentialsError, aws.CredentialRetrievalError, aws.MetadataRetrievalError)
            kind = StorageError if isinstance(error, passing) else Refused
            raise kind(
                f"can't {action} {where}: no usable AWS configuration ({first_line(error)}); run `aws configure`, or "
                "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_DEFAULT_REGION"
            ) from None

    def _explain(self, action: str, where: str, error: Any) -> StorageError:
        status = _status(error)
        if status == 404 and action in ("write", "list"):
            return Refused(
                f"can't use {where}: there is no bucket {self.bucket!r}; create it (aws s3 mb s3://{self.bucket}), "
                "or check the name"
            )
        if status == 404:
            return Missing(f"{where} does not exist, or its bucket doesn't; check the address")
        if status == 412:
            return Missing(f"{where} was replaced while it was read; run this again")
        if _is_temporary(error):
            return StorageError(f"can't {action} {where} ({first_line(error)}); run this again")
        remedy = _REMEDIES.get(error.response["Error"].get("Code", ""))
        if remedy is None and action == "write" and self._adds_checksums_elsewhere():
            remedy = f"if it refuses checksums, as R2 and older MinIO do, unset {_CHECKSUMS}"
        if remedy is None and status in (401, 403):
            remedy = (
                "allow this account s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket on the bucket "
                f"{self.bucket!r}"
            ) + ("" if _PAYER in os.environ else f", or if its requester pays, set {_PAYER}=requester")
        verdict = "not allowed" if status in (401, 403) else "the service refuses it"
        reason = f"can't {action} {where}: {verdict} ({first_line(error)})"
        return Refused(reason if remedy is None else f"{reason}; {remedy}")

    def _adds_checksums_elsewhere(self) -> bool:
        """Return whether another service than Amazon's gets checksums, because the environment says so."""
        client = self.client.meta
        return not _is_amazon(client.endpoint_url) and client.config.request_checksum_calculation == "when_supported"


@functools.lru_cache(MAX_CLIENTS)
def _make_client(bucket: str, settings: frozenset[tuple[str, str]]) -> Any:
    """Return a client of Amazon's service; raise `NoCredentialsError`.

    Creating a client takes longer than a read, so each bucket's client is kept; threads may share it.

    Args:
        bucket: The bucket that it is for; the client learns the bucket's region.
        settings: The environment variables that configure it.
    """
    session = boto3.session.Session()
    if session.get_credentials() is None:
        raise aws.NoCredentialsError
    client = session.client("s3", config=_CONFIG)
    if not _is_amazon(client.meta.endpoint_url) and _CHECKSUMS not in os.environ:
        client = session.client("s3", config=_OTHER_SERVICE)
    if payer := os.environ.get(_PAYER):
        # All calls here take it, and signed addresses get it, too.
        client.meta.events.register("provide-client-params.s3", lambda params, **_: params | {"RequestPayer": payer})
    return client


def _is_amazon(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


class _Upload(io.RawIOBase):
    """An object that is written in parts; none of them is visible before the last one is complete."""

    def __init__(self, storage: S3Storage, name: str, number: str = "") -> None:
        self._storage, self._name, self._number = storage, name, number
        self._waiting = bytearray()
        self._parts: list[dict[str, Any]] = []

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._waiting += content
        while len(self._waiting) >= PART_BYTES:
            self._send(bytes(self._waiting[:PART_BYTES]))
            del self._waiting[:PART_BYTES]
        return len(content)

    def finish(self) -> None:
        if not self._number:
            return self._storage.upload(self._name, bytes(self._waiting))
        if self._waiting:
            self._send(bytes(self._waiting))
        self._call("complete_multipart_upload", MultipartUpload={"Parts": self._parts})
        return None

    def abort(self) -> None:
        """Have its parts removed; if the service doesn't answer, `S3Storage.clean` does so later."""
        if self._number:
            with contextlib.suppress(StorageError):
                self._call("abort_multipart_upload")

    def _send(self, content: bytes) -> None:
        if not self._number:
            kind = content_type(self._name)
            self._number = self._call("create_multipart_upload", ContentType=kind)["UploadId"]
        part = {"PartNumber": len(self._parts) + 1}
        answer = self._call("upload_part", **part, Body=content)
        self._parts.append(part | {name: answer[name] for name in ("ETag", "ChecksumCRC32") if name in answer})

    def _call(self, method: str, **options: Any) -> Any:
        upload = {"UploadId": self._number} if self._number else {}
        ask = getattr(self._storage.client, method)
        return self._storage.call(
            "write", self._name, lambda key: ask(Bucket=self._storage.bucket, Key=key, **upload, **options)
        )


def repeat(call: Callable[[], T]) -> T:
    """Return what a call returns; on temporary errors it is repeated, with growing pauses, for `outage_s`."""
    pauses = exponential_sleep_generator(_PAUSE_S, _LONGEST_PAUSE_S)
    return retry_target(call, _is_temporary, pauses, base.outage_s(), exception_factory=_give_last)


def _give_last(errors: list[Exception], *_: object) -> tuple[Exception, None]:
    return errors[-1], None


def _is_temporary(error: Exception) -> bool:
    """Return whether a call that failed with this error may succeed when it is repeated."""
    if not isinstance(error, aws.ClientError):
        return isinstance(error, _SILENCE)
    return not is_refusal(_status(error)) or error.response["Error"].get("Code") == "RequestTimeout"  # Which is a 400.


def _status(error: Any) -> int:
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])


def _span(start: int, stop: int | None = None) -> dict[str, str]:
    return {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"}
