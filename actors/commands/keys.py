"""`wan-tpu keys add | list | limit | revoke | usage`: the API keys of a service, their limits and their usage."""

import argparse
import datetime
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.commands.arguments import add_actions, add_folder, check_range
from actors.commands.connection import spell_folder
from actors.commands.serve_arguments import NONE, choose_database
from wan_tpu.commands.parser import Parser
from wan_tpu.errors import InvalidInput
from wan_tpu.suggest import did_you_mean

if TYPE_CHECKING:
    from actors.jobs.tables import ApiKey


def keys(argv: Sequence[str]) -> None:
    """Create, list, limit and revoke API keys, and show what their jobs have used."""
    parser = Parser(prog="wan-tpu keys", description=keys.__doc__)
    actions = add_actions(parser)
    add = actions.add_parser(
        "add",
        help="create a key and print it, only this once; as soon as a database has a key, every request needs one",
    )
    add.add_argument("name", help="name of the key, such as its user's")
    list_ = actions.add_parser("list", help="list all valid keys, without their secrets")
    limit = actions.add_parser("limit", help="change a key's limits; running services apply them within a second")
    revoke = actions.add_parser("revoke", help="revoke a key; running services refuse it within a second")
    for action in (limit, revoke):
        action.add_argument("key", help="name or id of the key")
    for action in (add, limit):
        _add_limits(action)
    usage = actions.add_parser(
        "usage",
        help="show what each key's ended jobs have used (videos, chip-seconds, dollars), and what its files take",
    )
    usage.add_argument(
        "--days", type=int, default=30, help="number of days, in UTC, of which today is the last; default %(default)s"
    )
    for action in (add, list_, limit, revoke, usage):
        action.add_argument("--database", help="the --database of wan-tpu serve; default: a file in --folder")
        add_folder(action, owner="service, the --folder of wan-tpu serve")
    args = parser.parse_args(argv)
    if args.action == "usage":
        check_range(args, "days", 1, 36500)
    os.umask(0o077)

    from actors.jobs.keys import KeyLimits, limit_key, list_keys, make_key, revoke_key
    from actors.jobs.store import open_database

    address = choose_database(args.database, args.folder)
    shown = [] if args.database is None else ["--database", "..." if "://" in address else address]  # No password.
    add_command = shlex.join(["wan-tpu", "keys", "add", "NAME", *shown, *spell_folder(args)])
    if args.action != "add" and "://" not in address and not Path(address).exists():
        # Don't create the database here, because it would belong to the first user who happened to list its keys.
        message = f"there are no keys: the database {address} doesn't exist yet; {add_command} creates it"
        if args.action in ("limit", "revoke"):
            raise InvalidInput(message)
        print(message, file=sys.stderr)
        return
    database = open_database(address)
    match args.action:
        case "add":
            print(make_key(database, args.name, KeyLimits(**_read_limits(args))))
        case "limit":
            changes = _read_limits(args)
            if not changes:
                raise InvalidInput("no limit was given; give one, such as --waiting 10 or --per_minute none")
            KeyLimits(**changes)
            limit_key(database, args.key, changes)
            print(f"changed {args.key}")
        case "revoke":
            revoke_key(database, args.key)
            print(f"revoked {args.key}")
        case "list":
            valid_keys = [key for key in list_keys(database) if key.revoked_at is None]
            for key in valid_keys:
                print(_describe(key))
            if not valid_keys:
                print(f"{database} has no valid key; create one with {add_command}", file=sys.stderr)
        case "usage":
            _print_usage(database, args.days)


def _add_limits(parser: Parser) -> None:
    group = parser.add_group("limits", f'"{NONE}" removes the key\'s own limit.')
    for name, kind, text in (
        ("per_minute", float, "requests that the key may send per minute, on average"),
        (
            "waiting",
            int,
            "how many segments for a model may wait (most videos have one); without this limit, half its queue",
        ),
        ("running", int, "how many of its jobs may run at a time"),
        ("priority", int, "the highest priority that its jobs may have; without this limit, 0"),
        ("days", float, "number of days from now after which the key expires"),
    ):
        group.add_argument(f"--{name}", type=_allow_none(kind), default=argparse.SUPPRESS, help=text)
    group.add_argument(
        "--scopes",
        type=_read_scopes,
        default=argparse.SUPPRESS,
        help="what the key may do, separated by commas: make (and delete) videos, read its own, operate (see and "
        "cancel everybody's), admin (make and revoke keys, on the page /admin); a new key: make,read",
    )


def _read_scopes(text: str) -> tuple[str, ...]:
    from actors.jobs.keys import SCOPES

    scopes = tuple(scope.strip() for scope in text.split(","))
    for scope in scopes:
        if scope not in SCOPES:
            raise argparse.ArgumentTypeError(
                f"there is no scope {scope!r}{did_you_mean(scope, SCOPES)}; choose from {', '.join(SCOPES)}"
            )
    return scopes


def _allow_none(kind: Any) -> Any:
    """Return a type for argparse that also accepts `NONE`, and reads it as None."""

    def convert(text: str) -> Any:
        return None if text == NONE else kind(text)

    convert.__name__ = kind.__name__  # argparse puts the name into its errors.
    return convert


def _read_limits(args: argparse.Namespace) -> dict[str, Any]:
    """Return the limits that were given, by their names in `KeyLimits`."""
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


def _print_usage(database: Any, days: int) -> None:
    from actors.jobs.keys import list_keys
    from actors.jobs.tables import Usage
    from actors.jobs.usage import read_usage, sum_stored

    first = datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=days - 1)
    names = {key.id: key.name for key in list_keys(database)}
    print(f"since {first}, UTC")
    print(f"{'videos':>8} {'failed':>8} {'chip-seconds':>14} {'dollars':>10} {'GB now':>8}  key")
    stored = sum_stored(database)
    usage_by_owner = dict.fromkeys(stored, Usage(owner="", day="")) | read_usage(database, first=first.isoformat())
    if not usage_by_owner:
        print("no job has ended since then, and none has files", file=sys.stderr)
    for owner, usage in sorted(usage_by_owner.items(), key=lambda row: -row[1].chip_seconds):
        key = f"{owner}  {names.get(owner, '')}" if owner else "without a key"
        figures = f"{usage.videos:8} {usage.failed:8} {usage.chip_seconds:14.1f} {usage.dollars:10.2f}"
        print(f"{figures} {stored.get(owner, 0) / 1e9:8.2f}  {key}")
