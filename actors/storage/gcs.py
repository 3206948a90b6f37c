"""Google Cloud Storage behind the interface of `actors.storage.base`, with Google's own client.

Retries are the client's: every call here may be repeated without harm, so the client repeats it, with growing pauses,
on errors that pass. STORAGE_EMULATOR_HOST sends everything to an emulator, as that client does it.
"""

import contextlib
import datetime
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import requests
import urllib3
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.auth.credentials import Signing
from google.auth.transport.requests import AuthorizedSession, Request
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
from google.cloud.storage.retry import DEFAULT_RETRY

from actors.storage.base import GCS_SCHEME, Missing, OpenFile, Storage, StorageError, check_name
from wan_tpu.errors import InvalidInput

# https://cloud.google.com/storage/docs/buckets#naming
_BUCKET = re.compile(r"[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9]")
_TIMEOUT_S = (10.0, 60.0)  # To connect, and for each piece of a download.
_CONTENT_TYPES = {".mp4": "video/mp4", ".json": "application/json", ".jsonl": "application/jsonl", ".png": "image/png"}
_CONTENT_TYPES |= {".webp": "image/webp", ".jpg": "image/jpeg"}


class GcsStorage(Storage):
    """The objects below gs://bucket/prefix."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        if not _BUCKET.fullmatch(bucket):
            raise InvalidInput(f"{GCS_SCHEME}{bucket} names no bucket; give gs://bucket/prefix")
        self._name = bucket
        self._prefix = prefix.strip("/")
        if self._prefix:
            check_name(self._prefix, hidden=True)
        with self._explained("open", self.location()):
            self._client = storage.Client()
            self._session = AuthorizedSession(self._client._credentials)
        self._bucket = self._client.bucket(bucket)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return GcsStorage, (self._name, self._prefix)

    def location(self, name: str = "") -> str:
        """Return the gs:// address."""
        return GCS_SCHEME + "/".join(part for part in (self._name, self._prefix, name) if part)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the content of the object; of the whole one the client compares its checksum."""
        where = self.location(check_name(name))
        if stop is not None and stop <= start:
            return b""
        with self._explained("read", where):
            last = None if stop is None else stop - 1
            return self._blob(name).download_as_bytes(start=start or None, end=last, retry=DEFAULT_RETRY)

    def open(self, name: str, start: int = 0) -> OpenFile:
        """Open the generation of the object that is there now; its bytes come in one download."""
        where = self.location(check_name(name))
        with self._explained("read", where):
            found = self._bucket.get_blob(self._blob(name).name, retry=DEFAULT_RETRY)
            if found is None:
                raise Missing(f"{where} does not exist; check the address")
            return _OpenObject(self._session, found.media_link, start, lambda: self._explained("read", where))

    def size(self, name: str) -> int:
        """Return the size of the object."""
        where = self.location(check_name(name))
        with self._explained("look for", where):
            found = self._bucket.get_blob(self._blob(name).name, retry=DEFAULT_RETRY)
        if found is None or found.size is None:
            raise Missing(f"{where} does not exist; check the address")
        return int(found.size)

    def write(self, name: str, content: bytes) -> None:
        """Upload the object: it is there when the upload has ended well, whatever was there stays until then."""
        where = self.location(check_name(name))
        suffix = "." + name.rpartition(".")[2]
        kind = _CONTENT_TYPES.get(suffix, "application/octet-stream")
        with self._explained("write", where):
            self._blob(name).upload_from_string(content, content_type=kind, retry=DEFAULT_RETRY)

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return objects below the prefix."""
        below = self._prefix + "/" if self._prefix else ""
        with self._explained("list", self.location(prefix)):
            found = {
                blob.name.removeprefix(below): int(blob.size or 0)
                for blob in self._client.list_blobs(self._bucket, prefix=below + prefix, retry=DEFAULT_RETRY)
            }
        hidden = re.compile(r"(^|/)\.|/$")  # and the empty objects that consoles make as folders
        return {name: size for name, size in sorted(found.items()) if name and not hidden.search(name)}

    def delete(self, name: str) -> None:
        """Remove the object."""
        with contextlib.suppress(Missing), self._explained("delete", self.location(check_name(name))):
            self._blob(name).delete(retry=DEFAULT_RETRY)

    def probe(self) -> None:
        """Upload and remove a hidden object."""
        name = f".probe.{uuid.uuid4().hex[:12]}"
        with self._explained("write", self.location()):
            self._blob(name).upload_from_string(b"probe", retry=DEFAULT_RETRY)
            self._blob(name).delete(retry=DEFAULT_RETRY)

    def url(self, name: str, seconds: float, filename: str) -> str | None:
        """Return an address signed with a service account's key, or by IAM (iam.serviceAccounts.signBlob)."""
        with self._explained("sign an address of", self.location(check_name(name))):
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

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(f"{self._prefix}/{name}" if self._prefix else name)

    @contextlib.contextmanager
    def _explained(self, action: str, where: str) -> Iterator[None]:
        """Turn what the client raises into errors of this package."""
        try:
            yield
        except (api.NotFound, InvalidResponse) as error:
            if isinstance(error, InvalidResponse) and error.response.status_code != 404:
                raise StorageError(f"can't {action} {where} ({_first_line(error)}); try again") from None
            if action not in ("write", "list"):
                raise Missing(f"{where} does not exist, or its bucket doesn't; check the address") from None
            raise StorageError(
                f"can't use {where}: there is no bucket {self._name!r}; "
                f"make it (gcloud storage buckets create gs://{self._name}), or check the name"
            ) from None
        except (api.Forbidden, api.Unauthorized) as error:
            raise StorageError(
                f"can't {action} {where}: not allowed ({_first_line(error)}); "
                f"give this account the role roles/storage.objectUser on the bucket {self._name!r}"
            ) from None
        except auth.GoogleAuthError as error:
            raise StorageError(
                f"can't {action} {where}: no usable Google credentials ({_first_line(error)}); run `gcloud auth "
                "application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to a service account's key file"
            ) from None
        except (api.RetryError, requests.RequestException) as error:
            raise StorageError(
                f"can't {action} {where}: the service did not answer ({_first_line(error)}); "
                "check the network (and STORAGE_EMULATOR_HOST, if set), and run this again"
            ) from None
        except (api.GoogleAPICallError, DataCorruption) as error:
            raise StorageError(f"can't {action} {where} ({_first_line(error)}); run this again") from None


class _OpenObject:
    """An object that is downloaded as it is read, and from where it was where the connection breaks."""

    def __init__(
        self,
        session: AuthorizedSession,
        url: str,
        start: int,
        explained: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._session, self._url, self._position, self._explained = session, url, start, explained
        self._answer: requests.Response | None = None

    def read(self, size: int) -> bytes:
        with self._explained():
            content: bytes = DEFAULT_RETRY(self._read)(size)
        self._position += len(content)
        return content

    def close(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def _read(self, size: int) -> bytes:
        if self._answer is None:
            headers = {"Accept-Encoding": "identity"} | (
                {"Range": f"bytes={self._position}-"} if self._position else {}
            )
            answer = self._session.get(self._url, headers=headers, stream=True, timeout=_TIMEOUT_S)
            if answer.status_code >= 400:
                raise api.from_http_response(answer)
            self._answer = answer
        try:
            return self._answer.raw.read(size)
        except urllib3.exceptions.HTTPError as error:
            self.close()
            raise requests.ConnectionError(error) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
