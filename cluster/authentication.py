"""Ray's token authentication: on a cluster that we start, who hasn't this user's token can do nothing.

The token lies where Ray's own commands look for it: at RAY_AUTH_TOKEN_PATH, else ~/.ray/auth_token. RAY_AUTH_MODE, when
it is set already, is left as it is.
"""

import contextlib
import os
import secrets
from pathlib import Path

from cluster import ray_private

MODE, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"


def use_token() -> None:
    """Let this process, and those that it starts, show the user's token, if there is one."""
    if MODE not in os.environ and _has_token():
        os.environ[MODE] = "token"
    ray_private.reread_settings()


def make_token() -> None:
    """Use the user's token, and make one that only this user can read if there is none."""
    if os.environ.get(MODE, "token") == "token" and not _has_token():
        path = Path(os.environ.get(PATH) or Path.home() / ".ray" / "auth_token")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))  # As long as Ray's own.
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(part, path)
        part.unlink()
        ray_private.token_loader().reset_cache()
    use_token()


def _has_token() -> bool:
    """Whether there is a token; Ray raises where RAY_AUTH_TOKEN_PATH names a file that isn't there (2.60)."""
    path = None if os.environ.get("RAY_AUTH_TOKEN") else os.environ.get(PATH)
    return (not path or os.path.isfile(path)) and bool(ray_private.token_loader().has_token(ignore_auth_mode=True))
