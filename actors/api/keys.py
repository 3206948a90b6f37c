"""API keys: made at random, shown once, kept as hashes. A key's id is the owner of its jobs.

A key reads "wan_ID_SECRET". Its secret has 256 random bits, so that one round of SHA-256 can't be searched backwards.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from wan_tpu.errors import InvalidInput

ENVIRONMENT = "WAN_TPU_API_KEYS"  # the content of a key file, for places where secrets come as variables
_FORM = re.compile(r"wan_([0-9a-f]{16})_([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@ -]{0,63}")
_NOBODY = "0" * 64  # what an unknown key is compared with, so that it takes as long


class KeysError(InvalidInput):
    """The keys can't be read or changed as asked."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiKey:
    """What is kept of a key.

    id                   16 hex digits; the owner of its jobs
    name                 for people
    secret_hash          SHA-256 of the secret, hex
    created_at           Unix seconds
    requests_per_minute  at most so many, on average; None for no limit
    """

    id: str
    name: str
    secret_hash: str
    created_at: float
    requests_per_minute: float | None = None


def add_key(file: Path, name: str, requests_per_minute: float | None = None) -> tuple[str, ApiKey]:
    """Make a key and return its text, which is kept nowhere, and what is kept; raises `KeysError`."""
    if not _NAME.fullmatch(name):
        raise KeysError(f"the name {name!r} isn't 1 to 64 letters, digits, spaces or one of . _ @ - ; give such a name")
    if requests_per_minute is not None and not 0 < requests_per_minute <= 1e6:
        raise KeysError(f"requests per minute is {requests_per_minute:g}; allowed are above 0 to 1000000")
    with _changing(file) as keys:
        if any(key.name == name for key in keys.values()):
            raise KeysError(f"a key named {name!r} exists in {file}; revoke it first, or give another name")
        secret = secrets.token_hex(32)
        made = ApiKey(
            id=secrets.token_hex(8),
            name=name,
            secret_hash=_hash(secret),
            created_at=time.time(),
            requests_per_minute=requests_per_minute,
        )
        keys[made.id] = made
    return f"wan_{made.id}_{secret}", made


def list_keys(file: Path) -> list[ApiKey]:
    """Return the keys of a file, oldest first; none when there is no file."""
    return sorted(_read(file).values(), key=lambda key: key.created_at)


def revoke_key(file: Path, id_or_name: str) -> ApiKey:
    """Remove a key; services that use the file refuse it within a second. Its jobs stay until they expire."""
    with _changing(file) as keys:
        found = [key for key in keys.values() if id_or_name in (key.id, key.name)]
        if not found:
            names = ", ".join(sorted(key.name for key in keys.values())) or "none"
            raise KeysError(f"no key in {file} has the id or name {id_or_name!r}; there are: {names}")
        return keys.pop(found[0].id)


def parse_keys(text: str, source: str) -> dict[str, ApiKey]:
    """Return id -> key from the content of a key file; raises `KeysError` naming `source`."""
    try:
        found = [ApiKey(**entry) for entry in json.loads(text)["keys"]]
    except (ValueError, TypeError, LookupError) as error:
        raise KeysError(
            f"{source} is no list of keys ({type(error).__name__}); make one with: wan-tpu keys add"
        ) from None
    return {key.id: key for key in found}


def matching(keys: dict[str, ApiKey], presented: str) -> ApiKey | None:
    """Return the key that a text is, or None; it takes as long whether or not the id is known."""
    form = _FORM.fullmatch(presented)
    id_, secret = form.groups() if form else ("", "")
    known = keys.get(id_)
    same = hmac.compare_digest(_hash(secret), known.secret_hash if known else _NOBODY)
    return known if same and known is not None else None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _read(file: Path) -> dict[str, ApiKey]:
    try:
        return parse_keys(file.read_text(), str(file))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise KeysError(f"can't read {file} ({error}); check its permissions") from None


@contextlib.contextmanager
def _changing(file: Path) -> Iterator[dict[str, ApiKey]]:
    """Give the keys to be changed; write them back whole, readable by their owner only. One process at a time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file.with_name(f".{file.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            keys = _read(file)
            yield keys
            _write(file, {"keys": [dataclasses.asdict(key) for key in keys.values()]})
    except OSError as error:
        raise KeysError(f"can't write {file} ({error.strerror or error}); check its folder's permissions") from None


def _write(file: Path, content: object) -> None:
    handle, partial = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # made with mode 600
    try:
        with open(handle, "w") as out:
            json.dump(content, out, indent=1)
            out.write("\n")
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, file)
    except BaseException:
        os.unlink(partial)
        raise
