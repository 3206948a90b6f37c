"""API keys: generated at random, shown once, stored as hashes. A key's id is the owner of its jobs.

A key has the form "wan_ID_SECRET". Its secret has 256 random bits, so that one round of SHA-256 can't be inverted by
search. Once a key has been made in a database, services that use it require one: revoked keys stay as rows.
"""

import dataclasses
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from actors.jobs.database import Database
from actors.jobs.tables import ApiKey
from wan_tpu.errors import InvalidInput

MAKE, READ, OPERATE, ADMIN = SCOPES = ("make", "read", "operate", "admin")
PRIORITIES = (-100, 100)  # The lowest and highest priority of a job.
_FORM = re.compile(r"wan_([0-9a-f]{16})_([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@ -]{0,63}")
_NO_HASH = "0" * 64  # Unknown keys are compared with this, so that checking them takes as long.


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyLimits:
    """The scopes and limits of a key; None means that it has no limit of its own."""

    # "make": make and delete videos; "read": see one's own; "operate": see, cancel and delete everybody's; "admin":
    # make and revoke keys.
    scopes: tuple[str, ...] = (MAKE, READ)
    # How many requests it may send, on average, and for how many segments it may ask.
    requests_per_minute: float | None = None
    waiting: int | None = None  # How many segments of its jobs for one model may wait; most jobs have one.
    running: int | None = None  # How many of its jobs may run at a time.
    priority: int = 0
    days: float | None = None  # For how many days from now the key is valid.

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for values out of range."""
        if unknown := set(self.scopes) - set(SCOPES) or not self.scopes:
            raise InvalidInput(f"scopes were {unknown or 'none'}; give one or more of {', '.join(SCOPES)}")
        for name, lowest, highest in (
            ("requests_per_minute", 1e-3, 1e6),
            ("waiting", 0, 10**6),
            ("running", 1, 10**6),
            ("priority", *PRIORITIES),
            ("days", 0.001, 36500),
        ):
            value = getattr(self, name)
            if value is not None and not lowest <= value <= highest:
                raise InvalidInput(f"{name} is {value:g}; allowed: {lowest:g} to {highest:g}")


def make_key(database: Database, name: str, limits: KeyLimits = KeyLimits()) -> str:
    """Make a key and return its text, which is stored nowhere; raises `InvalidInput`."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"the name is {name!r}; give 1 to 64 letters, digits, spaces or the characters . _ @ -")
    secret = secrets.token_hex(32)
    key = ApiKey(id=secrets.token_hex(8), name=name, secret_hash=_hash(secret))
    with database.write() as session:
        database.serialize(session)
        if session.scalar(select(ApiKey.id).where(ApiKey.name == name, ApiKey.revoked_at.is_(None))):
            raise InvalidInput(f"a key named {name!r} exists in {database}; revoke it first, or give another name")
        key.created_at = database.now(session)
        _apply_limits(key, dataclasses.asdict(limits), key.created_at)
        session.add(key)
    return f"wan_{key.id}_{secret}"


def list_keys(database: Database) -> list[ApiKey]:
    """Return all keys, including revoked ones, oldest first."""
    with database.read() as session:
        return list(session.scalars(select(ApiKey).order_by(ApiKey.created_at, ApiKey.id)))


def limit_key(database: Database, id_or_name: str, changes: Mapping[str, Any]) -> None:
    """Change limits of a key. Services apply them within a second.

    Args:
        changes: New values by field of `KeyLimits`, already validated.

    Raises:
        InvalidInput: No key in force has that id or name.
    """
    with database.write() as session:
        for key in _find_in_force(database, session, id_or_name):
            _apply_limits(key, changes, database.now(session))


def revoke_key(database: Database, id_or_name: str) -> None:
    """Revoke a key: services refuse it within a second. Its jobs stay until they expire. Raises `InvalidInput`."""
    with database.write() as session:
        for key in _find_in_force(database, session, id_or_name):
            key.revoked_at = database.now(session)


def match_key(keys: Mapping[str, ApiKey], text: str) -> ApiKey | None:
    """Return the key that a text matches, if any, in the same time whether or not its id is known. `keys` are by id."""
    form = _FORM.fullmatch(text)
    id_, secret = form.groups() if form else ("", "")
    known = keys.get(id_)
    same = hmac.compare_digest(_hash(secret), known.secret_hash if known else _NO_HASH)
    return known if same and known is not None and known.revoked_at is None else None


def _find_in_force(database: Database, session: Session, id_or_name: str) -> list[ApiKey]:
    condition = (ApiKey.id == id_or_name) | (ApiKey.name == id_or_name)
    query = select(ApiKey).where(condition, ApiKey.revoked_at.is_(None)).order_by(ApiKey.id)
    keys = session.scalars(query.with_for_update()).all()
    if not keys:
        names = ", ".join(session.scalars(select(ApiKey.name).where(ApiKey.revoked_at.is_(None)).order_by(ApiKey.name)))
        raise InvalidInput(f"no key in {database} has the id or name {id_or_name!r}; the keys are: {names or 'none'}")
    return list(keys)


def _apply_limits(key: ApiKey, changes: Mapping[str, Any], now: float) -> None:
    for name, value in changes.items():
        match name:
            case "scopes":
                key.scopes = ",".join(value)
            case "days":
                key.expires_at = None if value is None else now + value * 86400
            case _:
                setattr(key, name, value)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
