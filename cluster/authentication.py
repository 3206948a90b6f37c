"""Ray's token authentication: nobody can use a cluster that we start without this user's token.

The token is stored where Ray's own commands look for it: at RAY_AUTH_TOKEN_PATH, else in ~/.ray/auth_token. If
RAY_AUTH_MODE is already set, it stays as it is.
"""

import contextlib
import os
import secrets
from pathlib import Path

from cluster import ray_private

MODE, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"


def use_token() -> None:
    """Let this process and its children authenticate with the user's token, if there is one."""
    if MODE not in os.environ and _has_token():
        os.environ[MODE] = "token"
    ray_private.reread_settings()


def make_token() -> None:
    """Use the user's token; if there is none, create one that only this user can read."""
    if os.environ.get(MODE, "token") == "token" and not _has_token():
        path = Path(os.environ.get(PATH) or Path.home() / ".ray" / "auth_token")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))  # Ray's own tokens have the same length.
        # Another process may have been first, in which case its token is used.
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
        part.unlink()
        ray_private.get_token_loader().reset_cache()
    use_token()


def _has_token() -> bool:
    """Return whether there is a token. Ray 2.60 would raise if RAY_AUTH_TOKEN_PATH names a file that doesn't exist."""
    path = None if os.environ.get("RAY_AUTH_TOKEN") else os.environ.get(PATH)
    return (not path or os.path.isfile(path)) and bool(ray_private.get_token_loader().has_token(ignore_auth_mode=True))
