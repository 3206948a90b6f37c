"""API keys: made at random, shown once, stored as hashes. A key's id is the owner of its jobs.

A key reads "wan_ID_SECRET". Its secret has 256 random bits, so that one round of SHA-256 can't be searched backwards.
Once a key was ever made in a database, the services that use it require one: revoked keys stay as rows.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping

from sqlalchemy import select

from actors.jobs.database import Database
from actors.jobs.tables import ApiKey
from wan_tpu.errors import InvalidInput

_FORM = re.compile(r"wan_([0-9a-f]{16})_([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@ -]{0,63}")
_NO_HASH = "0" * 64  # what an unknown key is compared with, so that it takes as long


def make_key(database: Database, name: str, requests_per_minute: float | None = None) -> str:
    """Make a key and return its text, which is stored nowhere; raises `InvalidInput`."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"the name {name!r} isn't 1 to 64 letters, digits, spaces or one of . _ @ - ; give such a name"
        )
    if requests_per_minute is not None and not 0 < requests_per_minute <= 1e6:
        raise InvalidInput(f"requests per minute is {requests_per_minute:g}; allowed are above 0 to 1000000")
    secret = secrets.token_hex(32)
    key = ApiKey(id=secrets.token_hex(8), name=name, secret_hash=_hash(secret), requests_per_minute=requests_per_minute)
    with database.write() as session:
        database.serialize(session)
        if session.scalar(select(ApiKey.id).where(ApiKey.name == name, ApiKey.revoked_at.is_(None))):
            raise InvalidInput(f"a key named {name!r} exists in {database}; revoke it first, or give another name")
        key.created_at = database.now(session)
        session.add(key)
    return f"wan_{key.id}_{secret}"


def list_keys(database: Database) -> list[ApiKey]:
    """Return all keys that were ever made, oldest first, revoked ones included."""
    with database.read() as session:
        return list(session.scalars(select(ApiKey).order_by(ApiKey.created_at, ApiKey.id)))


def revoke_key(database: Database, id_or_name: str) -> None:
    """Revoke a key: services refuse it within a second. Its jobs stay until they expire. Raises `InvalidInput`."""
    named = (ApiKey.id == id_or_name) | (ApiKey.name == id_or_name)
    with database.write() as session:
        found = session.scalars(select(ApiKey).where(named, ApiKey.revoked_at.is_(None)).with_for_update()).all()
        for key in found:
            key.revoked_at = database.now(session)
    if not found:
        names = ", ".join(sorted(key.name for key in list_keys(database) if key.revoked_at is None)) or "none"
        raise InvalidInput(f"no key in {database} has the id or name {id_or_name!r}; there are: {names}")


def match_key(keys: Mapping[str, ApiKey], presented: str) -> ApiKey | None:
    """Return which of the keys (by id) a text is, None for none; it takes as long whether or not the id is known."""
    form = _FORM.fullmatch(presented)
    id_, secret = form.groups() if form else ("", "")
    known = keys.get(id_)
    same = hmac.compare_digest(_hash(secret), known.secret_hash if known else _NO_HASH)
    return known if same and known is not None and known.revoked_at is None else None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
