"""`wan-tpu keys add | list | revoke`: who may use the service."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from actors.api.keys import add_key, list_keys, revoke_key

DEFAULT_FILE = Path("~/.config/wan-tpu/keys.json")


def keys(argv: Sequence[str]) -> None:
    """Make, show and revoke API keys."""
    parser = argparse.ArgumentParser(prog="wan-tpu keys", description=keys.__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="make a key and print it, this one time")
    add.add_argument("name", help="whose it is, for you to know it by")
    add.add_argument("--per_minute", type=float, help="requests a minute that it may send; default: no limit")
    show = actions.add_parser("list", help="show all keys, without their secrets")
    revoke = actions.add_parser("revoke", help="remove a key; running services refuse it within a second")
    revoke.add_argument("key", help="its name or id")
    for action in (add, show, revoke):
        action.add_argument("--file", type=Path, default=DEFAULT_FILE, help="of the keys' hashes; default %(default)s")
    args = parser.parse_args(argv)
    file = args.file.expanduser()
    if args.action == "add":
        text, _ = add_key(file, args.name, args.per_minute)
        print(text)
    elif args.action == "revoke":
        print(f"revoked {revoke_key(file, args.key).name}")
    else:
        for key in list_keys(file):
            made = time.strftime("%Y-%m-%d", time.gmtime(key.created_at))
            rate = "no limit" if key.requests_per_minute is None else f"{key.requests_per_minute:g} a minute"
            print(f"{key.id}  {made}  {rate:14}  {key.name}")
