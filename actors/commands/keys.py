"""`wan-tpu keys add | list | limit | revoke | usage`: who may use the service, for what, and what they have used."""

import argparse
import datetime
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.commands.serve_arguments import choose_database
from cluster.emulation.cluster import find_default_folder
from wan_tpu.commands.parser import Parser
from wan_tpu.errors import InvalidInput

if TYPE_CHECKING:
    from actors.jobs.tables import ApiKey

NONE = "none"


def keys(argv: Sequence[str]) -> None:
    """Make, show, limit and revoke API keys, and show what they have used."""
    parser = Parser(prog="wan-tpu keys", description=keys.__doc__)
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=Parser, help="what to do; each has a --help"
    )
    add = actions.add_parser("add", help="make a key and print it, this one time; from the first on, one is required")
    add.add_argument("name", help="whose it is, for you to know it by")
    show = actions.add_parser("list", help="show all keys in force, without their secrets")
    limit = actions.add_parser("limit", help="change limits; running services follow within a second")
    revoke = actions.add_parser("revoke", help="revoke a key; running services refuse it within a second")
    for action in (limit, revoke):
        action.add_argument("key", help="its name or id")
    for action in (add, limit):
        _add_limits(action)
    usage = actions.add_parser("usage", help="show videos, chip-seconds and dollars by key, of jobs that have ended")
    usage.add_argument("--days", type=int, default=30, help="until today, UTC; default %(default)s")
    for action in (add, show, limit, revoke, usage):
        action.add_argument("--database", help="of the service's jobs, as of wan-tpu serve; default: in --folder")
        action.add_argument(
            "--folder",
            type=Path,
            default=find_default_folder(),
            help="of the service's state, as of wan-tpu serve; default %(default)s",
        )
    args = parser.parse_args(argv)
    os.umask(0o077)

    from actors.jobs.keys import KeyLimits, limit_key, list_keys, make_key, revoke_key
    from actors.jobs.store import open_database

    address = choose_database(args.database, args.folder)
    if args.action != "add" and "://" not in address and not Path(address).exists():
        # Listing must not create the database: its owner would be the user who happened to list first.
        nothing = f"there are no keys, and no jobs: {address} isn't there yet; make a key with wan-tpu keys add NAME"
        if args.action in ("limit", "revoke"):
            raise InvalidInput(nothing)
        print(nothing, file=sys.stderr)
        return
    database = open_database(address)
    match args.action:
        case "add":
            print(make_key(database, args.name, KeyLimits(**_read_limits(args))))
        case "limit":
            changes = _read_limits(args)
            if not changes:
                raise InvalidInput("nothing to change; give a limit, such as --waiting 10 or --per_minute none")
            KeyLimits(**changes)
            limit_key(database, args.key, changes)
            print(f"changed {args.key}")
        case "revoke":
            revoke_key(database, args.key)
            print(f"revoked {args.key}")
        case "list":
            in_force = [key for key in list_keys(database) if key.revoked_at is None]
            for key in in_force:
                print(_describe(key))
            if not in_force:
                print(f"no key is in force in {database}; make one with wan-tpu keys add NAME", file=sys.stderr)
        case "usage":
            _show_usage(database, args.days)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits", f"{NONE}: no limit of its own")
    for name, kind, text in (
        ("per_minute", float, "requests that it may send, on average"),
        ("waiting", int, "jobs of it that may wait; else half of the queue"),
        ("running", int, "jobs of it that are made at a time"),
        ("priority", int, "the highest that its jobs may have; else 0"),
        ("days", float, "from now on that it is in force"),
    ):
        group.add_argument(f"--{name}", type=_allow_none(kind), default=argparse.SUPPRESS, help=text)
    scopes = "make (and delete), read one's own, operate (see and cancel everybody's); default: make,read"
    group.add_argument("--scopes", type=lambda text: tuple(text.split(",")), default=argparse.SUPPRESS, help=scopes)


def _allow_none(kind: Any) -> Any:
    """Return a type for argparse that also takes `NONE`."""

    def convert(text: str) -> Any:
        return None if text == NONE else kind(text)

    convert.__name__ = kind.__name__  # argparse names it in errors.
    return convert


def _read_limits(args: argparse.Namespace) -> dict[str, Any]:
    """Return the limits among the arguments, by their names in `KeyLimits`."""
    limits = {name: getattr(args, name) for name in ("waiting", "running", "days", "scopes") if name in args}
    if "per_minute" in args:
        limits["requests_per_minute"] = args.per_minute
    if "priority" in args:
        limits["priority"] = args.priority or 0
    return limits


def _describe(key: "ApiKey") -> str:
    created = time.strftime("%Y-%m-%d", time.gmtime(key.created_at))
    limits = [f"{key.requests_per_minute:g} a minute"] if key.requests_per_minute is not None else []
    limits += [f"{value} {name}" for name in ("waiting", "running") if (value := getattr(key, name)) is not None]
    limits += [f"priority {key.priority}"] if key.priority else []
    if key.expires_at is not None:
        ends = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(key.expires_at))
        limits.append(f"{'expired' if key.expires_at <= time.time() else 'until'} {ends}")
    return f"{key.id}  {created}  {key.scopes:9}  {key.name}" + (f"  ({', '.join(limits)})" if limits else "")


def _show_usage(database: Any, days: int) -> None:
    from actors.jobs.keys import list_keys
    from actors.jobs.usage import read_usage

    first = datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=days - 1)
    names = {key.id: key.name for key in list_keys(database)}
    print(f"since {first}, UTC\n{'videos':>8} {'failed':>8} {'chip-seconds':>14} {'dollars':>10}  key")
    used = read_usage(database, first=first.isoformat())
    if not used:
        print("no job has ended since then", file=sys.stderr)
    for owner, row in sorted(used.items(), key=lambda row: -row[1].chip_seconds):
        whose = f"{owner}  {names.get(owner, '')}" if owner else "without a key"
        print(f"{row.videos:8} {row.failed:8} {row.chip_seconds:14.1f} {row.dollars:10.2f}  {whose}")
