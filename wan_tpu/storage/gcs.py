"""Google Cloud Storage, with Google's own client.

The client does the retries: every call here may be repeated without harm, so the client repeats it, with growing
pauses, on temporary errors. STORAGE_EMULATOR_HOST redirects the client to an emulator.
"""

import contextlib
import datetime
import os
import re
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import requests
import urllib3
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.auth.credentials import Signing
from google.auth.transport.requests import AuthorizedSession, Request
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
from google.cloud.storage.retry import DEFAULT_RETRY

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

_PAYER = PAYERS["gs://"]
# What to do, by words of the service's message; its status (400, 403) and reason are the same for many causes.
_REMEDIES = {
    "requester pays": f"set {_PAYER} to the project that pays for reading this bucket",
    "serviceusage.services.use": "give this account roles/serviceusage.serviceUsageConsumer on the project that pays "
    f"({_PAYER})",
    "billing account": "enable billing for the bucket's project",
    "vpcServiceControls": "let this account through the service perimeter of the bucket's project",
}
_MAX_ANSWER = 2000  # Characters of an error's body that are looked at.
_TIMEOUT_S = (10.0, 60.0)  # Time-outs of a connection, and of each piece of a download.


class GcsStorage(BucketStorage):
    """The objects below gs://bucket/prefix."""

    scheme = "gs://"
    bucket_pattern = re.compile(r"[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9]")  # cloud.google.com/storage/docs/buckets#naming

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(bucket, prefix)
        with self._explain_errors("open", self.location()):
            self._client = storage.Client()
            self._session = AuthorizedSession(self._client._credentials)
        self._bucket = self._client.bucket(bucket, user_project=os.environ.get(_PAYER))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the content of the object; the client verifies the checksum of a whole one."""
        where = self.location(check_name(name))
        if stop is not None and stop <= start:
            return b""
        with self._explain_errors("read", where):
            last = None if stop is None else stop - 1
            return self._blob(name).download_as_bytes(start=start or None, end=last, retry=_retry())

    def open(self, name: str, start: int = 0) -> OpenFile:
        """Open the generation of the object that is there now; its bytes come in one download."""
        where = self.location(check_name(name))
        with self._explain_errors("read", where):
            blob = self._bucket.get_blob(self.key(name), retry=_retry())
            if blob is None:
                raise Missing(f"{where} does not exist; check the address")
        payer = self._bucket.user_project
        link = blob.media_link if payer is None else f"{blob.media_link}&userProject={quote(payer)}"

        def connect(at: int) -> Any:
            headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={at}-"} if at else {})
            answer = self._session.get(link, headers=headers, stream=True, timeout=_TIMEOUT_S)
            if answer.status_code >= 400:
                raise api.from_http_response(answer)
            return answer.raw

        def repeat(read: Callable[[], bytes]) -> bytes:
            with self._explain_errors("read", where):
                content: bytes = _retry()(read)()
                return content

        return Download(connect, repeat, start)

    def stat(self, name: str) -> StoredObject:
        """Return the size and the generation of the object."""
        where = self.location(check_name(name))
        with self._explain_errors("look for", where):
            blob = self._bucket.get_blob(self.key(name), retry=_retry())
        if blob is None or blob.size is None:
            raise Missing(f"{where} does not exist; check the address")
        return StoredObject(int(blob.size), str(blob.generation))

    def objects(self, prefix: str = "") -> dict[str, StoredObject]:
        """Return all objects below the prefix; their versions are generations."""
        below = self.key("")
        with self._explain_errors("list", self.location(prefix)):
            return {
                blob.name.removeprefix(below): StoredObject(int(blob.size or 0), str(blob.generation))
                for blob in self._client.list_blobs(self._bucket, prefix=below + prefix, retry=_retry())
                if not blob.name.endswith("/")  # the empty objects that consoles make as folders
            }

    def read_version(self, name: str, version: str, start: int, stop: int) -> bytes:
        """Return bytes of a generation."""
        with self._explain_errors("read", self.location(name)):
            blob = self._blob(name, int(version))
            return blob.download_as_bytes(start=start, end=stop - 1, raw_download=True, retry=_retry())

    def download(self, name: str, version: str, path: Path) -> None:
        """Write a generation to a file."""
        with self._explain_errors("read", self.location(name)):
            self._blob(name, int(version)).download_to_filename(str(path), retry=_retry())

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Provide a file that is uploaded as it is written, without a local copy."""
        with self._explain_errors("write", self.location(check_name(name))):
            with self._blob(name).open("wb", content_type=content_type(name), retry=_retry()) as file:
                yield file

    def upload(self, name: str, content: bytes) -> None:
        """Upload the object, a large one in a resumable upload."""
        with self._explain_errors("write", self.location(name)):
            self._blob(name).upload_from_string(content, content_type=content_type(name), retry=_retry())

    def remove(self, name: str) -> None:
        """Remove the object."""
        with self._explain_errors("delete", self.location(name)):
            self._blob(name).delete(retry=_retry())

    def url(self, name: str, seconds: float, filename: str) -> str | None:
        """Return an address signed with a service account's key, or by IAM (iam.serviceAccounts.signBlob)."""
        with self._explain_errors("sign an address of", self.location(check_name(name))):
            signer: dict[str, Any] = {}
            account = self._client._credentials
            if not isinstance(account, Signing):  # a machine's own account: IAM signs for it
                if getattr(account, "service_account_email", None) is None:  # a person, or an emulator
                    return None
                account.refresh(Request())
                signer = {"service_account_email": account.service_account_email, "access_token": account.token}
            return self._blob(name).generate_signed_url(
                version="v4",
                expiration=datetime.timedelta(seconds=seconds),
                response_disposition=f'inline; filename="{filename}"',
                **signer,
            )

    def _blob(self, name: str, generation: int | None = None) -> Any:
        return self._bucket.blob(self.key(name), generation=generation)

    @contextlib.contextmanager
    def _explain_errors(self, action: str, where: str) -> Iterator[None]:
        """Turn what the client raises into errors of this package, by whose fault it is."""
        try:
            yield
        except (api.NotFound, InvalidResponse) as error:
            if isinstance(error, InvalidResponse) and error.response.status_code != 404:
                raise self._explain(action, where, error, error.response.status_code) from None
            if action not in ("write", "list"):
                raise Missing(f"{where} does not exist, or its bucket doesn't; check the address") from None
            raise Refused(
                f"can't use {where}: there is no bucket {self.bucket!r}; create it (gcloud storage buckets create "
                f"gs://{self.bucket}), or check the name"
            ) from None
        except auth.GoogleAuthError as error:
            kind = Refused if _is_refused(error) else StorageError
            raise kind(
                f"can't {action} {where}: no usable Google credentials ({first_line(error)}); run `gcloud auth "
                "application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to a service account's key file"
            ) from None
        except (api.RetryError, requests.RequestException, urllib3.exceptions.HTTPError, HTTPException) as error:
            raise StorageError(
                f"can't {action} {where}: the service did not answer ({first_line(error)}); "
                "check the network (and STORAGE_EMULATOR_HOST, if set), and run this again"
            ) from None
        except (api.GoogleAPIError, DataCorruption) as error:
            raise self._explain(action, where, error, int(getattr(error, "code", None) or 500)) from None

    def _explain(self, action: str, where: str, error: Exception, status: int) -> StorageError:
        """Return our error for an answer of the service. What to do comes from its words, not from its status."""
        if not is_refusal(status):
            return StorageError(f"can't {action} {where} ({first_line(error)}); run this again")
        answer = getattr(error, "response", None)
        text = f"{error} {'' if answer is None else answer.text[:_MAX_ANSWER]}"
        remedy = next((remedy for words, remedy in _REMEDIES.items() if words in text), None)
        verdict = "the service refuses it"
        if status in (401, 403):
            verdict = "not allowed"
            remedy = remedy or f"give this account the role roles/storage.objectUser on the bucket {self.bucket!r}"
        reason = f"can't {action} {where}: {verdict} ({first_line(error)})"
        return Refused(reason if remedy is None else f"{reason}; {remedy}")


def _is_refused(error: auth.GoogleAuthError) -> bool:
    """Return whether the server that grants access has refused, and would refuse again."""
    if isinstance(error, auth.DefaultCredentialsError):
        # Its subclasses say what is wrong with credentials that exist. Without a key file, they come from the machine's
        # metadata server, whose silence, as when a pod has just started, can't be told from its absence.
        return type(error) is not auth.DefaultCredentialsError or "GOOGLE_APPLICATION_CREDENTIALS" in os.environ
    if isinstance(error, auth.RefreshError):
        return not error.retryable and not isinstance(error.__cause__, auth.TransportError)
    return False


def _retry() -> Any:
    return DEFAULT_RETRY.with_timeout(base.outage_s())
