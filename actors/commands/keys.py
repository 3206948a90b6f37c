"""`wan-tpu keys add | list | revoke`: who may use the service."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from actors.commands.serve_arguments import database_address
from cluster.emulation.cluster import default_folder


def keys(argv: Sequence[str]) -> None:
    """Make, show and revoke API keys."""
    parser = argparse.ArgumentParser(prog="wan-tpu keys", description=keys.__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="make a key and print it, this one time; from the first on, one is required")
    add.add_argument("name", help="whose it is, for you to know it by")
    add.add_argument("--per_minute", type=float, help="requests a minute that it may send; default: no limit")
    show = actions.add_parser("list", help="show all keys in force, without their secrets")
    revoke = actions.add_parser("revoke", help="revoke a key; running services refuse it within a second")
    revoke.add_argument("key", help="its name or id")
    for action in (add, show, revoke):
        action.add_argument("--database", help="of the service's jobs, as of wan-tpu serve; default: in --folder")
        action.add_argument("--folder", type=Path, default=default_folder(), help="as of wan-tpu serve; %(default)s")
    args = parser.parse_args(argv)

    from actors.jobs.keys import list_keys, make_key, revoke_key
    from actors.jobs.store import open_database

    database = open_database(database_address(args.database, args.folder))
    if args.action == "add":
        print(make_key(database, args.name, args.per_minute))
    elif args.action == "revoke":
        revoke_key(database, args.key)
        print(f"revoked {args.key}")
    else:
        for key in list_keys(database):
            if key.revoked_at is None:
                made = time.strftime("%Y-%m-%d", time.gmtime(key.created_at))
                rate = "no limit" if key.requests_per_minute is None else f"{key.requests_per_minute:g} a minute"
                print(f"{key.id}  {made}  {rate:14}  {key.name}")
